"""Selections of DSA layers in SGLang, translated back into positions in their requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_indexcache.families.dsa.blocks.index_space import RAGGED, kind_of
from sglang_indexcache.io.errors import ProofError


def positions_of(metadata: Any, selected: Tensor, rows: Tensor, requests: Tensor) -> Tensor:
    """Translate `selected` into positions, as the inverse of `index_space`.

    Args:
        metadata: a `DSAIndexerMetadata`.
        selected: the selections of a layer in SGLang's form, `[rows, k]`, -1 for none.
        rows: rows of the queries in the pass, `[rows]`.
        requests: numbers of their requests in the pass, `[rows]`.

    Returns:
        `[rows, k]`, int32, -1 for none.

    Raises:
        ProofError: if SGLang's index space is not known here, or an index is of no token that its row sees.
    """
    kind, attention, none = kind_of(metadata), metadata.attn_metadata, selected < 0
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
