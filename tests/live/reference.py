"""transformers with the same roles, made to attend to what SGLang selected, and asked what it would have selected.

Two implementations of one model differ by rounding, and rounding decides ties at the k-th score. Following SGLang's
selections keeps both on one path, so that logprobs can be compared on every row, and each differing selection can be
judged where it happened: by the scores that transformers itself gave to the tokens in dispute.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.hy_v4 import modeling_hy_v4

from dsa_cpu_platform.recorder import Run, indexers
from indexcache_kernels.transformers import INDEXER_ROPES, index_vectors
from indexcache_search.hf import indexers as search_indexers
from indexcache_search.hf.roles import apply_roles
from scripts.tools.inprocess import Served
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe, family_of_modules

TOLERANCE = 1e-5  # of logprobs, random models: 3e-6 is seen

Selections = dict[int, dict[int, frozenset[int]]]
"""Model layer, position, what it attends to: positions, or entries of four tokens (DeepSeek-V4)."""


@dataclass(frozen=True)
class Replay:
    """What transformers says of a sequence that SGLang served.

    Attributes:
        logprobs: of tokens 1, 2, ...
        rows: selections compared.
        disputed: for each selection that differs, the distance of the farthest disputed token's score to the k-th.
    """

    logprobs: Tensor
    rows: int
    disputed: tuple[float, ...]


def load_reference(model: Path) -> Any:
    """The transformers model in float32, one thread, so that it matches from run to run.

    HY-V4's checkpoints were trained with interleaved rotary embeddings, as SGLang and vLLM have it; transformers 5.15
    to 5.24 rotates halves. So a search refuses it, but here its indexers may select in blocks, too.
    """
    modeling_hy_v4.apply_rotary_pos_emb = apply_rotary_pos_emb_interleave
    INDEXER_ROPES["hy_v4"] = apply_rotary_pos_emb_interleave
    search_indexers.index_vectors = rotated_first
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def rotated_first(indexer: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`index_vectors`, also of HY-V4, whose indexers rotate the end of a vector: with parts swapped, products stay."""
    if not isinstance(indexer, modeling_hy_v4.HYV4Indexer):
        return index_vectors(indexer, *given)
    wide = indexer.qk_rope_head_dim

    def swapped(vectors: Tensor) -> Tensor:
        return torch.cat([vectors[..., -wide:], vectors[..., :-wide]], dim=-1)

    def queries(residual: Tensor) -> Tensor:
        return swapped(indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, -1))).flatten(-2)

    names = ("qk_rope_head_dim", "head_dim", "n_heads", "softmax_scale", "wk", "weights_proj")
    like = {name: getattr(indexer, name) for name in names}
    return index_vectors(
        SimpleNamespace(**like, wq_b=queries, k_norm=lambda keys: swapped(indexer.k_norm(keys))), *given
    )


def selections(runs: Sequence[Run], requests: Sequence[str]) -> Selections:
    """What the indexers chose for a sequence that was computed by `requests`, the last of which has the last word.

    With a prefix hit, the cached part was computed by an earlier request. All ranks must have chosen alike.
    """
    chosen: Selections = {}
    for request in requests:
        own: Selections = {}
        for run in indexers(runs):
            if run.selected is None:
                continue
            for rid, position, row in zip(run.requests, run.positions, run.selected, strict=True):
                if rid == request:
                    picked = frozenset(index for index in row.tolist() if index >= 0)
                    known = own.setdefault(run.layer, {}).setdefault(position, picked)
                    assert known == picked, f"two ranks chose differently: layer {run.layer}, position {position}"
        for layer, rows in own.items():
            chosen.setdefault(layer, {}).update(rows)
    return chosen


def check_selections(
    model: Any,
    pattern: Pattern,
    served: Served,
    requests: Sequence[str],
    runs: Sequence[Run],
    prompt: Tensor | None = None,
) -> None:
    """All selections and logprobs of a sequence are those of transformers.

    Args:
        model: transformers'.
        pattern: that was served.
        served: the sequence.
        requests: by which it was computed.
        runs: what the indexers did.
        prompt: which queries select in blocks, `[1, tokens]`.
    """
    chosen = selections(runs, requests)
    expected: dict[int, Tensor] = {}

    def observe(layer: int, indices: Tensor) -> None:
        if pattern[layer] != "S":
            expected[layer] = indices[0]

    ids = torch.tensor([list(served.ids[:-1])])
    with torch.inference_mode(), apply_roles(model, pattern, observe, prompt=prompt):
        logits = model(ids, use_cache=False).logits[0]
    assert set(expected) == {layer for layer, letter in enumerate(pattern.roles) if letter != "S"}
    rows = [
        (layer, position, {index for index in row if 0 <= index <= position} ^ chosen[layer][position])
        for layer, indices in expected.items()
        for position, row in enumerate(indices.tolist())
    ]
    differing = [f"layer {layer}, position {position}: {sorted(tokens)}" for layer, position, tokens in rows if tokens]
    assert not differing, f"{len(differing)} of {len(rows)} differ: {'; '.join(differing[:5])}"
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(served.ids[1:])[:, None])[:, 0]
    found = torch.tensor(served.logprobs)
    assert (logprobs[-len(found) :] - found).abs().max().item() <= TOLERANCE


def replay(model: Any, pattern: Pattern, ids: Sequence[int], chosen: Selections) -> Replay:
    """Run `ids` through `model` with `pattern`, every indexer answering what SGLang's did."""
    disputed: list[float] = []
    rows = 0
    description = describe(model.config.to_dict(), "reference")
    ratio = description.first_sparse_position // description.index_topk  # tokens that one index stands for

    def follow(layer: int, run: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal rows
            own, scores = _selection_and_scores(run, args, kwargs)
            answer = own.clone()
            for position in range(own.shape[1]):
                visible = (position + 1) // ratio
                theirs = chosen[layer][position]
                if visible <= own.shape[2]:  # everything is visible, nothing to choose
                    assert theirs == frozenset(range(visible)), f"layer {layer}, position {position}: not all tokens"
                    continue
                rows += 1
                ours = frozenset(own[0, position].tolist())
                if theirs != ours:
                    threshold = min(scores[0, position, list(ours)].tolist())
                    gaps = [abs(scores[0, position, token].item() - threshold) for token in theirs ^ ours]
                    disputed.append(max(gaps))
                    answer[0, position] = torch.tensor(sorted(theirs))
            return answer

        return forward

    with ExitStack() as stack:
        for letter, selector in enumerate(family_of_modules(model).transformers.indexer_modules(model)):
            if pattern[letter] == "F":
                selector.forward = follow(description.layers[letter], selector.forward)
                stack.callback(selector.__dict__.pop, "forward")
        with torch.inference_mode(), apply_roles(model, pattern):
            logits = model(torch.tensor([list(ids[:-1])]), use_cache=False).logits[0]
    logprobs = logits.log_softmax(dim=-1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
    return Replay(logprobs, rows, tuple(disputed))


def _selection_and_scores(run: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """An indexer's `[1, queries, k]` choice and the `[1, queries, tokens]` scores that it called `topk` on."""
    seen: list[Tensor] = []
    original = Tensor.topk

    def topk(self: Tensor, *a: Any, **k: Any) -> Any:
        seen.append(self)
        return original(self, *a, **k)

    Tensor.topk = topk  # type: ignore[method-assign]
    try:
        own = run(*args, **kwargs)
    finally:
        Tensor.topk = original  # type: ignore[method-assign]
    return own, seen[-1]
