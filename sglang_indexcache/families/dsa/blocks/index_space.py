"""The index spaces in which SGLang's DSA backend returns selections.

A selection holds positions in its request where SGLang selects and translates in two steps. Otherwise it holds slots of
the cache (`PAGED`), or indices among the keys of all requests of the pass (`RAGGED`). Read: dsa_indexer_metadata.py and
dsa_topk_backend.py in sglang/srt/layers/attention/dsa of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from typing import Any

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
    kind, attention = kind_of(metadata), metadata.attn_metadata
    if kind is None:
        return IndexSpace()
    if kind == RAGGED:
        return IndexSpace(offsets=attention.topk_indices_offset[rows].int())
    return IndexSpace(pages=metadata.get_page_table_64(), requests=requests, page_size=attention.page_size)


def kind_of(metadata: Any) -> str | None:
    """Return the index space of `metadata.topk_transform`; `None` for positions."""
    from sglang.srt.environ import envs

    if metadata.force_unfused_topk or not envs.SGLANG_DSA_FUSE_TOPK.get():
        return None
    kind: str = metadata.topk_transform_method.name
    if kind not in (PAGED, RAGGED):
        raise ProofError(f"SGLang gives selections as {kind}, expected {PAGED} or {RAGGED}")
    return kind
