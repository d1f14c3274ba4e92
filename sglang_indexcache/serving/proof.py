"""After loading: every attention module of every rank does what the pattern says, with weights from the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.serving.ranks import ProofError, RankReport, all_ranks, disagreement, meet_all_ranks

logger = logging.getLogger(__name__)

_CHECKPOINT_NAMES = (".weight", ".bias", ".weight_scale_inv")


@dataclass(frozen=True)
class Effective:
    """What an attention module will do.

    Attributes:
        role: `F` or `S`.
        has_indexer: whether there is an indexer to run.
        unloaded: an indexer parameter that no weight was loaded into, or `None`.
    """

    role: str
    has_indexer: bool
    unloaded: str | None = None


def attention_modules(model: Any) -> Iterator[Any]:
    """The DSA attention modules of a model, NextN modules left out: those always run their own indexer."""
    for module in model.modules():
        shares = getattr(module, "skip_topk", None) is not None and hasattr(module, "next_skip_topk")
        if shares and not getattr(module, "is_nextn", False):
            yield module


def prepare(model: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after `_initialize_model`, before weights are loaded: meet the other ranks, mark what must be loaded."""
    if next(attention_modules(model), None) is not None:  # draft models have none
        meet_all_ranks()
        mark_unloaded(model)


def mark_unloaded(model: Any) -> None:
    """Fill the indexers of F layers with NaN, which loading replaces.

    SGLang does not notice parameters that no weight was loaded into, and runs them as they are.
    """
    for module in attention_modules(model):
        if not module.skip_topk and getattr(module, "indexer", None) is not None:
            for _, parameter in _checkpoint_tensors(module.indexer):
                parameter.data.fill_(float("nan"))


def current_roles(model: Any) -> dict[int, str]:
    """The role of each layer of this rank, `F` or `S`."""
    return {module.layer_id: SHARED if module.skip_topk else FULL for module in attention_modules(model)}


def effective_roles(model: Any) -> dict[int, Effective]:
    """What the loaded layers of this rank will do, by layer."""
    found = {}
    for module in attention_modules(model):
        indexer = getattr(module, "indexer", None)
        unloaded = None
        if indexer is not None and not module.skip_topk:
            names = (
                name for name, parameter in _checkpoint_tensors(indexer) if parameter.data.float().isnan().any().item()
            )
            unloaded = next(names, None)
        found[module.layer_id] = Effective(SHARED if module.skip_topk else FULL, indexer is not None, unloaded)
    return found


def mismatch(pattern: Pattern, effective: dict[int, Effective]) -> str | None:
    """One line if the loaded layers differ from `pattern`; pipeline stages hold some of the layers only."""
    if not effective:
        return "the loaded model has no DSA attention module, so the pattern can't take effect"
    for layer, found in sorted(effective.items()):
        if layer >= len(pattern):
            return f"the loaded model has a DSA layer {layer}, the pattern has {len(pattern)} letters"
        if found.role != pattern[layer]:
            return f"layer {layer} would run as {found.role}, the pattern says {pattern[layer]}"
        if found.role == FULL and not found.has_indexer:
            return f"layer {layer} is F, but the loaded model has no indexer there"
        if found.unloaded is not None:
            return f"layer {layer} is F, but no weights were loaded into its indexer's {found.unloaded}"
    return None


class Asked(Protocol):
    """Whoever knows which pattern must run."""

    @property
    def pattern(self) -> Pattern: ...


def prover(request: Asked) -> Callable[..., None]:
    """Hook after `ModelRunner.load_model`: compare this rank with the pattern, and all ranks with each other.

    Every rank hears of every other's problem and ends with the same line.

    Raises:
        ProofError: from the hook, if anything differs.
    """

    def after(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(runner, "is_draft_worker", False):
            return
        effective = effective_roles(runner.model)
        problem = mismatch(request.pattern, effective)
        report = RankReport(request.pattern.fingerprint, tuple(sorted(effective)), problem)
        reports = all_ranks(report)
        problem = disagreement(request.pattern, reports)
        if problem is not None:
            raise ProofError(problem)
        logger.info(
            "indexcache: serving %s, fingerprint %s, proven on %d attention modules here and %d rank(s)",
            request.pattern,
            request.pattern.fingerprint,
            len(effective),
            len(reports),
        )

    return after


def _checkpoint_tensors(indexer: Any) -> Iterator[tuple[str, Any]]:
    """Parameters that every checkpoint has and that can hold NaN; quantisation adds some that have defaults."""
    for name, parameter in indexer.named_parameters():
        if name.endswith(_CHECKPOINT_NAMES) and parameter.data.is_floating_point():
            yield name, parameter
