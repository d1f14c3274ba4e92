"""C layers of SGLang's DSA models, and the F layers that they choose from.

`Indexer._get_topk_ragged` selects for the queries of a prefill, `_get_topk_paged` while decoding, also inside CUDA
graphs. An F layer that gives candidates runs SGLang's methods and keeps, of the scores that they hand to SGLang's
top-k, the best for each query; they stay with the forward pass. A C layer's methods are replaced: it scores these
tokens alone, where their index keys are in the cache.

Read: dsa_indexer.py, dsa_indexer_metadata.py, dsa_topk_backend.py, dsa_prefill_cuda_graph.py in
sglang/srt/layers/attention/dsa, dsa_backend.py beside it, and mem_cache/memory_pool.py of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels import candidate_topk
from indexcache_kernels.candidate_topk import Pages
from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dsa.index_space import in_index_space
from sglang_indexcache.families.dsa.method import Method

_GIVEN = "_indexcache_candidates"
_SCORES = 1 << 26  # that are looked at a time: with copies half a gigabyte


class Giving(Method):
    """Of an F layer: selects as ever, and keeps each query's best tokens for the C layers above.

    Args:
        indexer: SGLang's.
        method: which one.
        layer: its letter.
        counts: each times index_topk tokens.
    """

    def __init__(self, indexer: Any, method: str, layer: int, counts: Iterable[int]) -> None:
        super().__init__(indexer, method)
        self.layer, self.counts = layer, frozenset(counts)

    def select(self, sglangs: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        sizes = {count: count * self.indexer.index_topk for count in sorted(self.counts)}
        watched = _Watched(given["metadata"], sizes)
        selected = sglangs(**given | {"metadata": watched})
        best = {count: torch.cat(parts) for count, parts in watched.best.items() if parts}
        setattr(given["forward_batch"], _GIVEN, (self.layer, best))
        return selected


class Choosing(Method):
    """Of a C layer: scores its candidates alone.

    Args:
        indexer: SGLang's.
        method: which one.
        layer: its letter.
        giver: that of the F layer which gives them.
        count: how many, times index_topk.
    """

    def __init__(self, indexer: Any, method: str, layer: int, giver: int, count: int) -> None:
        super().__init__(indexer, method)
        self.layer, self.giver, self.count = layer, giver, count

    def select(self, sglangs: Callable[..., Tensor], given: dict[str, Any]) -> Tensor:
        q, metadata, result = given["q_fp8"], given["metadata"], given.get("topk_result")
        candidates = self._candidates(given["forward_batch"])
        number = torch.arange(len(candidates), device=q.device)
        requests = metadata.get_token_to_batch_idx() if "enable_dual_stream" in given else number  # decoding: one each
        keys, scales = index_keys(self.indexer, given["layer_id"], q, metadata.attn_metadata.page_size)
        positions = candidate_topk(
            q[: len(candidates)],
            keys,
            given["weights"][: len(candidates), :, 0],
            candidates=candidates,
            topk=self.indexer.index_topk,
            k_scale=scales,
            pages=Pages(metadata.get_page_table_64(), requests.int()),
        )
        if result is None:  # there may be rows behind the last token
            result = torch.full((len(q), positions.shape[1]), -1, device=q.device, dtype=torch.int32)
        result[: len(positions)] = in_index_space(metadata, positions, number, requests)
        return result

    def _candidates(self, forward_batch: Any) -> Tensor:
        nothing: tuple[int | None, dict[int, Tensor]] = (None, {})
        giver, given = getattr(forward_batch, _GIVEN, nothing)
        if giver != self.giver or self.count not in given:
            raise ProofError(
                f"letter {self.layer} chooses from what letter {self.giver} scored highest, which gave nothing in this"
                " forward pass"
            )
        candidates: Tensor = given[self.count]
        return candidates


class _Watched:
    """A `DSAIndexerMetadata` that keeps the best of the scores that it is handed, by count; positions, ascending."""

    def __init__(self, metadata: Any, sizes: dict[int, int]) -> None:
        self._metadata, self._sizes = metadata, sizes
        self.best: dict[int, list[Tensor]] = {count: [] for count in sizes}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metadata, name)

    def topk_transform(self, logits: Tensor, topk: int, **given: Any) -> Tensor:
        lengths, starts = given.get("ke_offset"), given.get("ks")
        lengths = self._metadata.get_seqlens_expanded() if lengths is None else lengths
        for count, tokens in self._sizes.items():
            self.best[count].append(best_tokens(logits, starts, lengths, tokens))
        selected: Tensor = self._metadata.topk_transform(logits, topk, **given)
        return selected


def best_tokens(scores: Tensor, starts: Tensor | None, lengths: Tensor, tokens: int) -> Tensor:
    """Of each row the columns with the highest scores, counted from the row's first, `[rows, tokens]`, int32.

    Ascending, -1 behind them.

    Args:
        scores: `[rows, columns]`; what a row does not see may be anything.
        starts: the first column that each row sees, `[rows]`; `None` for 0.
        lengths: how many it sees, `[rows]`.
        tokens: at most so many.
    """
    rows, width = scores.shape
    found = torch.full((rows, tokens), -1, device=scores.device, dtype=torch.int32)
    column, most = torch.arange(width, device=scores.device), min(tokens, width)
    first = torch.zeros_like(lengths) if starts is None else starts
    step = max(1, _SCORES // max(1, width))
    for at in range(0, rows, step):
        part = slice(at, at + step)
        begin, length = first[part, None], lengths[part, None]
        seen = (column >= begin) & (column < begin + length)
        best = scores[part].masked_fill(~seen, float("-inf")).topk(most, dim=1, sorted=False).indices
        best = torch.where(seen.gather(1, best), best - begin, width).sort(dim=1).values
        found[part, :most] = best.masked_fill(best == width, -1).int()
    return found


def index_keys(indexer: Any, layer_id: int, q: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Index keys `[pages, page, dim]` and their scales `[pages, page]` in the cache, where they are.

    A page has its keys, and behind them their scales in float32.
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    buffer = indexer._get_index_k_read_buffer(get_token_to_kv_pool(), layer_id)  # [pages, bytes]
    width = page * q.shape[2] * q.element_size()
    if buffer.ndim != 2 or buffer.dtype != torch.uint8 or buffer.shape[1] != width + 4 * page:
        raise ProofError(
            f"index keys are {list(buffer.shape)} of {buffer.dtype}, expected {width + 4 * page} bytes for each page"
        )
    keys = buffer[:, :width].view(q.dtype).unflatten(1, (page, q.shape[2]))
    return keys, buffer[:, width:].view(torch.float32)
