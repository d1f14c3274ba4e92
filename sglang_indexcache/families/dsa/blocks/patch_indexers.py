"""Make the indexers of SGLang's DSA models select in blocks and share out rows, and read back which ones do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sglang_indexcache.families.dsa.blocks.context import ONE_RANK, Context
from sglang_indexcache.families.dsa.blocks.rows import PrefillSelection
from sglang_indexcache.families.dsa.blocks.selection import BlockSelection
from sglang_indexcache.families.dsa.blocks.shards import Shards
from sglang_indexcache.families.dsa.needs import DECODING, PREFILL
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.messages import NO_INDEXER
from sglang_indexcache.io.refusal import SHARD_FLAG
from sglang_indexcache.pattern import FULL, Pattern
from sglang_indexcache.pattern.indexer_setting import IndexerSetting
from sglang_indexcache.sglang.attention import unobserved

Modules = Iterable[tuple[int, Any]]


def install(modules: Modules, pattern: Pattern, here: Context = ONE_RANK) -> None:
    """Make the indexers of attention modules do what `pattern` says; layers that are elsewhere are left out.

    Raises:
        ProofError: if a layer's indexer is of another kind, or selects fewer tokens than a block has.
    """
    indexers = {layer: getattr(module, "indexer", None) for layer, module in modules}
    for item in pattern.indexers:
        if item.layer not in indexers:
            continue
        indexer: Any = indexers[item.layer]
        _check_patchable(item.layer, indexer, "select in blocks")
        if item.queries > indexer.index_topk:
            raise ProofError(
                f"layer {item.layer} selects for {item.queries} queries at a time, expected at most index_topk"
                f" ({indexer.index_topk})"
            )
        setattr(indexer, PREFILL, BlockSelection(indexer, item.queries, ranks=here))


def share_rows(modules: Modules, pattern: Pattern, shards: Shards) -> None:
    """Make the indexers of F layers select for this rank's part of the rows, those that select in blocks included.

    Raises:
        ProofError: if a layer's indexer is of another kind, or there is one rank.
    """
    if shards.ranks == 1:
        raise ProofError(f"{SHARD_FLAG} shares out rows over the ranks of attention, and there is one")
    for layer, module in modules:
        if pattern[layer] != FULL:
            continue
        indexer = getattr(module, "indexer", None)
        placed = {} if indexer is None else vars(indexer)
        if isinstance(placed.get(PREFILL), PrefillSelection):
            placed[PREFILL].shards = shards
        else:
            _check_patchable(layer, indexer, "share out rows")
            setattr(indexer, PREFILL, PrefillSelection(indexer, shards))


def _check_patchable(layer: int, indexer: Any, doing: str) -> None:
    """Check that the indexer of a layer is of the kind that our selections were made for."""
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer as SglangIndexer

    if indexer is None:
        raise ProofError(f"layer {layer} should {doing}, but the loaded model has {NO_INDEXER}")
    if torch.version.hip is not None or indexer.wq_b.weight.device.type not in ("cuda", "cpu"):
        raise ProofError(f"layer {layer} should {doing}, which was never tried on such a device; expected CUDA")
    for method in (PREFILL, DECODING):
        if getattr(type(indexer), method, None) is not getattr(SglangIndexer, method):
            raise ProofError(f"layer {layer}: {type(indexer).__name__} selects in a way of its own")
    if indexer.num_init_tokens or indexer.num_local_tokens:
        raise ProofError(f"layer {layer} always selects the first or last tokens, so it can't {doing}")


def read_back(modules: Modules) -> tuple[tuple[IndexerSetting, ...], dict[int, int], dict[int, int]]:
    """Read from the attention modules which layers select in blocks, and over how many ranks layers share out rows.

    Returns:
        Layers in blocks, ranks over which layers share out rows, and ranks over which SGLang does that for blocks.

    Raises:
        ProofError: if something else replaced the indexers' methods.
    """
    placed = dict(_placed(modules))
    in_blocks = {layer: found for layer, found in placed.items() if isinstance(found, BlockSelection)}
    indexers = tuple(IndexerSetting(layer=layer, queries=found.queries) for layer, found in in_blocks.items())
    shared = {layer: found.shards.ranks for layer, found in placed.items() if found.shards.ranks > 1}
    return indexers, shared, {layer: found.ranks.ranks for layer, found in in_blocks.items() if found.ranks.ranks > 1}


def _placed(modules: Modules) -> Iterator[tuple[int, PrefillSelection]]:
    for layer, module in modules:
        indexer = getattr(module, "indexer", None)
        own = {} if indexer is None else vars(indexer)
        found = {name: unobserved(own.get(name)) for name in (PREFILL, DECODING)}
        patches = {name: patch for name, patch in found.items() if patch is not None}
        selection = patches.get(PREFILL)
        if isinstance(selection, PrefillSelection) and len(patches) == 1:
            yield layer, selection
        elif patches:
            names = ", ".join(type(patch).__name__ for patch in patches.values())
            raise ProofError(f"layer {layer} selects by {names}, expected SGLang's own methods")
