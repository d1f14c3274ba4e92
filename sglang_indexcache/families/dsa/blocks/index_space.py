"""The index spaces in which SGLang's DSA backend returns selections.

A selection holds positions in its request where SGLang selects and translates in two steps. Otherwise it holds slots of
the cache (`PAGED`), or indices among the keys of all requests of the pass (`RAGGED`). Read: dsa_indexer_metadata.py and
dsa_topk_backend.py in sglang/srt/layers/attention/dsa of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from indexcache_kernels.prompt_blocks import IndexSpace
from sglang_indexcache.io.errors import ProofError

PAGED, RAGGED = "PAGED", "RAGGED"


def index_space(metadata: Any, rows: Tensor, requests: Tensor) -> IndexSpace:
    """Return how positions become indices as `metadata.topk_transform` returns them, for the same forward pass.

    Args:
        metadata: a `DSAIndexerMetadata`.
        rows: rows of the positions in the pass, `[R]`.
        requests: numbers of their requests in the pass, `[R]`, int32.

    Raises:
        ProofError: if SGLang's index space is not known here.
    """
    kind, attention = _kind(metadata), metadata.attn_metadata
    if kind is None:
        return IndexSpace()
    if kind == RAGGED:
        return IndexSpace(offsets=attention.topk_indices_offset[rows].int())
    return IndexSpace(pages=metadata.get_page_table_64(), requests=requests, page_size=attention.page_size)


def positions_of(metadata: Any, selected: Tensor, rows: Tensor, requests: Tensor) -> Tensor:
    """Translate `selected` into positions, as the inverse of `index_space`; `[rows, k]`, int32, -1 for none.

    Raises:
        ProofError: if SGLang's index space is not known here, or an index is of no token that its row sees.
    """
    kind, attention, none = _kind(metadata), metadata.attn_metadata, selected < 0
    length = metadata.get_seqlens_expanded()[rows][:, None]
    if kind is None:
        positions = selected
    elif kind == RAGGED:
        positions = selected - attention.topk_indices_offset[rows][:, None]
    else:
        positions = torch.empty_like(selected)
        for request in sorted(set(requests.tolist())):
            own = requests == request
            slots, order = attention.page_table_1[request, : int(length[own].max())].sort()
            place = torch.searchsorted(slots, selected[own].to(slots.dtype)).clamp_max(len(slots) - 1)
            found = torch.where(slots[place] == selected[own], order[place], len(slots))  # len(slots): no such slot
            positions[own] = found.to(selected.dtype)
    if ((positions < 0) | (positions >= length))[~none].any():
        raise ProofError(f"a query selects what is no token before it, read as {kind or 'positions'}")
    return torch.where(none, -1, positions).int()


def _kind(metadata: Any) -> str | None:
    """Return the index space of `metadata.topk_transform`; `None` for positions."""
    from sglang.srt.environ import envs

    if metadata.force_unfused_topk or not envs.SGLANG_DSA_FUSE_TOPK.get():
        return None
    kind: str = metadata.topk_transform_method.name
    if kind not in (PAGED, RAGGED):
        raise ProofError(f"SGLang gives selections as {kind}, expected {PAGED} or {RAGGED}")
    return kind
