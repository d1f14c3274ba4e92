"""What takes the place of methods of SGLang's indexers, where a layer scores less than everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dsa.blocks import BlockSelection
from sglang_indexcache.families.dsa.candidates import Choosing, Giving
from sglang_indexcache.families.dsa.needs import METHODS, PREFILL
from sglang_indexcache.indexers import Indexer
from sglang_indexcache.pattern import Pattern


def install(modules: Iterable[tuple[int, Any]], pattern: Pattern) -> None:
    """Make the indexers of attention modules score what a pattern says; layers that are elsewhere are left out.

    Raises:
        ProofError: if a layer's indexer is of another kind, selects less than a block, or has its candidates elsewhere.
    """
    indexers = {layer: getattr(module, "indexer", None) for layer, module in modules}
    given: dict[int, set[int]] = {}
    for item in pattern.indexers:
        if item.layer not in indexers:
            continue
        indexer = _replaceable(item.layer, indexers[item.layer])
        if item.queries:
            if item.queries > indexer.index_topk:
                raise ProofError(
                    f"letter {item.layer} selects for {item.queries} queries at a time, expected at most index_topk"
                    f" ({indexer.index_topk})"
                )
            setattr(indexer, PREFILL, BlockSelection(indexer, item.queries))
            continue
        giver = pattern.scorer(item.layer)
        if giver not in indexers:
            raise ProofError(
                f"letter {item.layer} chooses from what letter {giver} scored highest, which is in another pipeline"
                " stage; expected an F layer between them"
            )
        given.setdefault(giver, set()).add(item.candidates)
        for method in METHODS:
            setattr(indexer, method, Choosing(indexer, method, item.layer, giver, item.candidates))
    for giver, counts in given.items():
        indexer = _replaceable(giver, indexers[giver])
        for method in METHODS:
            setattr(indexer, method, Giving(indexer, method, giver, counts))


def _replaceable(layer: int, indexer: Any) -> Any:
    """The indexer of a layer, if what it does is known.

    Raises:
        ProofError: if not.
    """
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer as SglangIndexer

    if indexer is None:
        raise ProofError(f"letter {layer} should score something, but the loaded model has no indexer there")
    if torch.version.hip is not None or indexer.wq_b.weight.device.type not in ("cuda", "cpu"):
        raise ProofError(
            f"letter {layer} does not score everything, which was never tried on such a device; expected CUDA"
        )
    for method in METHODS:
        if getattr(type(indexer), method, None) is not getattr(SglangIndexer, method):
            raise ProofError(f"letter {layer}: {type(indexer).__name__} selects in a way of its own")
    if indexer.num_init_tokens or indexer.num_local_tokens:
        raise ProofError(f"letter {layer} always selects the first or last tokens, so it must score everything")
    return indexer


def installed(modules: Iterable[tuple[int, Any]]) -> Iterator[Indexer]:
    """What the indexers of attention modules would do, read from them; those that score everything are left out.

    Raises:
        ProofError: if something else took the place of their methods, or candidates would come from nowhere.
    """
    indexers = {layer: getattr(module, "indexer", None) for layer, module in modules}
    for layer, indexer in indexers.items():
        placed = [] if indexer is None else [vars(indexer).get(method) for method in METHODS]
        kinds = [type(item) for item in placed if item is not None]
        if kinds == [BlockSelection] and placed[METHODS.index(PREFILL)] is not None:
            yield Indexer(layer=layer, queries=placed[METHODS.index(PREFILL)].queries)
        elif kinds == [Choosing, Choosing]:
            [(giver, count)] = {(item.giver, item.count) for item in placed}
            for method in METHODS:
                gives = vars(indexers[giver]).get(method)
                if not isinstance(gives, Giving) or count not in gives.counts:
                    raise ProofError(
                        f"letter {layer} chooses from what letter {giver} scored highest, which gives nothing"
                    )
            yield Indexer(layer=layer, candidates=count)
        elif kinds not in ([], [Giving, Giving]):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise ProofError(f"letter {layer} selects by {names}, expected SGLang's own methods")


def chooses(module: Any) -> bool:
    """Whether an attention module's indexer chooses among candidates."""
    indexer = getattr(module, "indexer", None)
    return indexer is not None and isinstance(vars(indexer).get(PREFILL), Choosing)
