"""Runs of a dense model under plans for keys, with the last outputs kept and all costs counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indexcache_kernels.patching import replaced
from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation.plan import Plan
from indexcache_search.lab.key_delta.attention import Watcher, apply_key_plan
from indexcache_search.lab.key_delta.plan import KeyPlan, Stage
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import DENSE, FULL, SHARED
from sglang_indexcache.pattern.selection import CHUNK, COMPRESSED_KEYS, STRIDE


class KeyRuns:
    """Runner of plans. Each plan runs once on a sequence, for both loss and costs.

    Args:
        model: a dense model of transformers.
        limit: bytes of host memory for outputs of the unchanged model's layers, so that a plan runs from the first
            layer that it changes (without room for one batch it runs in full); and as many for the last runs' hidden
            states, since loss and divergence are requested one after the other.
    """

    def __init__(self, model: Any, limit: float = 0.0) -> None:
        self._model, self._limit = model, limit
        self._exact: OrderedDict[tuple[str, tuple[int, ...]], list[Tensor]] = OrderedDict()
        self._hidden: OrderedDict[tuple[KeyPlan, str, tuple[int, ...]], Tensor] = OrderedDict()
        self._work: dict[tuple[KeyPlan, str, int, Stage], tuple[int, int]] = {}

    @torch.inference_mode()
    def hidden(self, plan: KeyPlan, rows: Sequence[int], data: TokenSet) -> Tensor:
        """Return post-norm hidden states, `[rows, tokens, hidden]`."""
        key = (plan, data.sha256, tuple(rows))
        if key not in self._hidden:
            device = self._model.device
            tokens = torch.from_numpy(data.tokens[list(rows)].astype(np.int64)).to(device)
            read = torch.from_numpy(read_tokens(data)[list(rows)]).to(device)
            below = next((layer for layer, value in enumerate(plan.values) if value), 0)
            below = below if plan.method == "key_delta" else 0
            outputs = self._outputs(plan, key[1:], tokens, read) if below else []
            layers = self._model.model.layers[: below if outputs else 0]
            given = outputs[below - 1].to(device) if outputs else None  # of all of them; the last one's is used
            with (
                replaced(*((layer, "forward", lambda *_, **__: given) for layer in layers)),
                apply_key_plan(self._model, plan, read) as work,
            ):
                self._hidden[key] = self._model.model(input_ids=tokens, use_cache=False).last_hidden_state
            ran = len(plan.values) - len(layers)
            for stage, computed in work.computed.items():
                left = work.everything[stage] // ran * len(layers)  # products of the layers that need not run
                pairs = zip((computed + left).tolist(), (work.everything[stage] + left).tolist(), strict=True)
                for row, pair in zip(rows, pairs, strict=True):
                    self._work[plan, data.sha256, row, stage] = pair
            while len(self._hidden) > 1 and sum(item.nbytes for item in self._hidden.values()) > self._limit:
                self._hidden.popitem(last=False)
        return self._hidden[key]

    def _outputs(self, plan: KeyPlan, batch: tuple[str, tuple[int, ...]], tokens: Tensor, read: Tensor) -> list[Tensor]:
        """Return each layer's output in the unchanged model, `[rows, tokens, hidden]`; none if there is no room."""
        model = self._model
        size = tokens.numel() * model.config.hidden_size * model.dtype.itemsize * len(plan.values)
        if size > self._limit:
            return []
        if batch not in self._exact:
            while self._exact and (len(self._exact) + 1) * size > self._limit:
                self._exact.popitem(last=False)
            outputs: list[Tensor] = []
            layers = model.model.layers[: len(plan.values)]
            hooks = [layer.register_forward_hook(lambda _m, _i, out: outputs.append(out.cpu())) for layer in layers]
            try:
                with apply_key_plan(model, replace(plan, values=(0.0,) * len(plan.values)), read):
                    model.model(input_ids=tokens, use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
            self._exact[batch] = outputs
        self._exact.move_to_end(batch)
        return self._exact[batch]

    @torch.inference_mode()
    def watch(self, plan: KeyPlan, row: int, data: TokenSet, watch: Watcher) -> None:
        """Run a sequence under `plan`, and call `watch` with the keys of each layer, `[1, G, L, D]`."""
        tokens = torch.from_numpy(data.tokens[[row]].astype(np.int64)).to(self._model.device)
        with apply_key_plan(self._model, plan, watch=watch):
            self._model.model(input_ids=tokens, use_cache=False)

    def work(self, plan: Plan, row: int, data: TokenSet, stage: Stage) -> tuple[int, int]:
        """Count a sequence's products of queries with keys: those computed, and those of attention to everything.

        Plans for keys count multiply-adds during the run; patterns count pairs of a query and a key.
        """
        if isinstance(plan, Pattern):
            return pairs_of(plan, read_tokens(data)[row], None if data.prompt is None else data.prompt[row], stage)
        assert isinstance(plan, KeyPlan)
        key = (plan, data.sha256, row, stage)
        if key not in self._work:
            self.hidden(plan, [row], data)
        return self._work[key]


def read_tokens(data: TokenSet) -> NDArray[np.bool_]:
    """Return the mask of tokens that are read at once, `[sequences, tokens]`: prompts, and texts without replies."""
    if data.prompt is None:
        return np.ones_like(data.tokens, dtype=bool)
    return np.asarray(data.prompt | ~data.prompt.any(axis=1, keepdims=True))


def in_stage(read: NDArray[np.bool_], stage: Stage) -> NDArray[np.bool_]:
    """Return the part of `read_tokens` in `stage`."""
    return read if stage == "reading" else ~read


def pairs_of(
    pattern: Pattern, read: NDArray[np.bool_], prompt: NDArray[np.bool_] | None, stage: Stage
) -> tuple[int, int]:
    """Count pairs of a query and a key in all layers: those under a pattern of a dense model, and all.

    A prompt attends to everything, and so does an `F` layer that selects by its attention. Compressed keys count as
    keys. `read` and `prompt` are `[tokens]`; without a prompt every token selects, as if the text was a reply.
    """
    selection = pattern.selection
    assert selection is not None
    position = np.flatnonzero(in_stage(read, stage))
    chooses = np.ones(len(position), bool) if prompt is None else ~prompt[position]
    chosen = (selection.pages - 1) * selection.page_tokens + position % selection.page_tokens + 1
    few = np.where(chooses, np.minimum(position + 1, chosen), position + 1)
    compressed = np.where(few <= position, np.maximum((position + 1 - CHUNK) // STRIDE + 1, 0), 0)
    own = few + compressed if selection.score == COMPRESSED_KEYS else position + 1
    pairs = {SHARED: few, FULL: own, DENSE: position + 1}
    return sum(int(pairs[role].sum()) for role in pattern.roles), len(pattern) * int((position + 1).sum())
