"""The two tables of SGLang's backend that say which layer chooses blocks, and which reuses whose choice.

`MiniMaxSparseAttnBackend` fills them from a frequency, and reads them at each call of a layer. In prompts a layer takes
the choice of its group, in decoding that of the last layer that chose: a group is one chooser and the rest, so both
are the same. Read: sglang/srt/layers/attention/minimax_sparse_backend.py of 0.5.23.
"""

from __future__ import annotations

from typing import Any

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.pattern import FULL, SHARED, Pattern

SWITCH, GROUP_SIZE, SOURCES, GROUPS = (
    "index_cache_enabled",
    "_idx_group_size",
    "_topk_is_source",
    "_topk_group_of_layer",
)
TOLD = "indexcache_letters"  # on a backend: what was written last
_HYBRID, _SPARSE = "MiniMaxHybridAttnBackend", "MiniMaxSparseAttnBackend"
_MODULE = "sglang.srt.layers.attention.minimax_sparse_backend"


def sparse_backend(runner: Any) -> Any:
    """Return the backend of the layers that choose, of a `ModelRunner`.

    Raises:
        ProofError: if it is another one, or runs in a way in which nothing is shared.
    """
    found = runner.attn_backend
    inner: Any = getattr(found, "sparse", None)
    if not (_is(found, _HYBRID) and _is(inner, _SPARSE)):
        kind = type(found if inner is None else inner)
        raise ProofError(
            f"the attention backend is {kind.__module__}.{kind.__qualname__}, expected {_HYBRID} with {_SPARSE}, whose"
            " layers can share"
        )
    for name, what in (
        ("is_npu", "an NPU, where its layers don't share"),
        ("use_dense_sparse_decode", "SGLANG_OPT_USE_MINIMAX_DENSE_SPARSE_DECODE, which shares in prompts alone"),
        ("hisparse_coordinator", "HiSparse, which was never tried with a pattern"),
        ("indexer_cp", "SGLANG_MINIMAX_M3_INDEXER_CP, which was never tried with a pattern"),
    ):
        if getattr(inner, name):
            raise ProofError(f"MiniMax-M3 runs with {what}; expected it without")
    if inner.index_topk_freq > 1:
        raise ProofError(
            f"SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ is {inner.index_topk_freq}, which says which layers share, too;"
            " expected it unset"
        )
    return inner


def _is(found: Any, name: str) -> bool:
    return (type(found).__module__, type(found).__qualname__) == (_MODULE, name)


def write(backend: Any, layers: dict[int, Any], pattern: Pattern) -> None:
    """Make a backend's layers choose and reuse as `pattern` says.

    Args:
        backend: SGLang's `MiniMaxSparseAttnBackend`.
        layers: the attention module of each letter.
        pattern: with a letter for each of them.

    Raises:
        ProofError: if they are others than those that the backend knows.
    """
    ids = [layers[letter].attn.layer_id for letter in sorted(layers)]
    known = [layer for layer in backend.sparse_layer_ids if layer in backend.disable_value_layer_ids]
    if ids != known or sorted(layers) != list(range(len(pattern))):
        raise ProofError(
            f"the loaded model has an index in layers {ids}, SGLang's backend shares among {known}, and the pattern has"
            f" {len(pattern)} letters; expected the same layers"
        )
    sizes = {module.num_idx_heads // module.num_kv_heads or 1 for module in layers.values()}
    if len(sizes) > 1:
        raise ProofError(f"layers differ in index heads for each key head ({sorted(sizes)}), expected the same number")
    setattr(backend, TOLD, pattern.roles)
    setattr(backend, SOURCES, {layer: pattern[letter] == FULL for letter, layer in enumerate(ids)})
    setattr(backend, GROUPS, {layer: pattern.source_layers[letter] for letter, layer in enumerate(ids)})
    setattr(backend, GROUP_SIZE, sizes.pop())
    setattr(backend, SWITCH, not pattern.is_full)  # as SGLang has it where nothing is shared


def role(backend: Any, layer: int) -> str:
    """Return the letter that a layer would run, by what SGLang reads at each call of it.

    Raises:
        ProofError: if the tables don't say, or an S layer would attend to another choice than that of the nearest F.
    """
    if not getattr(backend, SWITCH):
        return FULL
    sources, groups = getattr(backend, SOURCES), getattr(backend, GROUPS)
    if layer not in sources or layer not in groups or layer not in backend.disable_value_layer_ids:
        raise ProofError(f"SGLang's tables of who chooses say nothing of layer {layer}")
    nearest = max((item for item, chooses in sources.items() if chooses and item <= layer), default=None)
    if nearest is None:
        raise ProofError(f"layer {layer} would reuse a choice, and none of the layers below it chooses")
    chosen_by = [item for item, chooses in sources.items() if chooses and groups.get(item) == groups[layer]]
    if chosen_by != [nearest]:
        raise ProofError(
            f"layer {layer} would take the choice of layers {chosen_by} in prompts and of {nearest} in decoding;"
            " expected one and the same"
        )
    return FULL if sources[layer] else SHARED
