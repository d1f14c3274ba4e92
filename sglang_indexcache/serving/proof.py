"""After loading: every attention module of every rank does what the pattern says, with weights from the checkpoint.

What this process has proven is all that `/server_info`, metrics and the word to the main process ever report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_indexcache.errors import IndexCacheError, ProofError
from sglang_indexcache.families.base import Family
from sglang_indexcache.indexers import CANDIDATES, Indexer
from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.probes import LOAD_MODEL, Need
from sglang_indexcache.serving.ranks import (
    RankReport,
    all_ranks,
    disagreement,
    meet_all_ranks,
    read_back,
)

logger = logging.getLogger(__name__)

_CHECKPOINT_NAMES = (".weight", ".bias", ".weight_scale_inv", ".ape")


@dataclass(frozen=True)
class Effective:
    """What an attention module will do.

    Attributes:
        role: its letter.
        has_indexer: whether there is an indexer to run.
        unloaded: an indexer parameter that no weight was loaded into, or `None`.
    """

    role: str
    has_indexer: bool
    unloaded: str | None = None


@dataclass(frozen=True)
class Proof:
    """What all ranks of this process's model were found to run.

    Attributes:
        pattern: read from the loaded modules of all ranks, layer by layer.
        modules: attention modules on this rank.
        ranks: how many agreed.
    """

    pattern: Pattern
    modules: int
    ranks: int

    def status(self, source: str) -> dict[str, Any]:
        """Plain types, for `/server_info`; `source` is the file that was asked for."""
        selection = self.pattern.selection
        return {
            **({} if selection is None else {"selection": selection.as_dict()}),
            "pattern": self.pattern.letters,
            "fingerprint": self.pattern.fingerprint,
            "retention": self.pattern.retention,
            "full_layers": len(self.pattern.full_layers),
            "shared_layers": len(self.pattern.shared_layers),
            "source": source,
            "proven_ranks": self.ranks,
        }


class Proven:
    """The proof of this process, once there is one."""

    def __init__(self) -> None:
        self._proof: Proof | None = None

    def set(self, proof: Proof) -> None:
        self._proof = proof

    @property
    def proof(self) -> Proof:
        """The proof.

        Raises:
            ProofError: if the model was loaded without one.
        """
        if self._proof is None:
            raise ProofError("the loaded model was not compared with the pattern, since SGLang loads it in another way")
        return self._proof


class Asked(Protocol):
    """Whoever knows which pattern must run, and on what kind of model."""

    @property
    def pattern(self) -> Pattern: ...

    @property
    def family(self) -> Family: ...


def preparer(asked: Asked) -> Callable[..., None]:
    """Hook after `_initialize_model`, before weights are loaded: meet the other ranks, mark what must be loaded."""

    def after(model: Any, *args: Any, **kwargs: Any) -> None:
        if next(asked.family.modules(model), None) is not None:  # draft models have none
            meet_all_ranks()
            mark_unloaded(asked.family, model)

    return after


def mark_unloaded(family: Family, model: Any) -> None:
    """Fill the indexers of F layers with NaN, which loading replaces.

    SGLang does not notice parameters that no weight was loaded into, and runs them as they are.
    """
    for site, module in family.modules(model):
        indexer = family.indexer(module)
        if indexer is not None and family.role(site, module) == FULL:
            for _, parameter in _checkpoint_tensors(indexer):
                parameter.data.fill_(float("nan"))


def current_roles(family: Family, model: Any) -> dict[int, str]:
    """The letter of each site of this rank."""
    return {site: family.role(site, module) for site, module in family.modules(model)}


def effective_roles(family: Family, model: Any) -> dict[int, Effective]:
    """What the loaded sites of this rank will do."""
    effective = {}
    for site, module in family.modules(model):
        indexer, role = family.indexer(module), family.role(site, module)
        unloaded = None
        if indexer is not None and role in (FULL, CANDIDATES):
            names = (
                name for name, parameter in _checkpoint_tensors(indexer) if parameter.data.float().isnan().any().item()
            )
            unloaded = next(names, None)
        effective[site] = Effective(role, indexer is not None, unloaded)
    return effective


def mismatch(pattern: Pattern, effective: dict[int, Effective], begins_every_stage: bool = False) -> str | None:
    """One line if the loaded layers differ from `pattern`; pipeline stages hold some of the layers only.

    Args:
        pattern: what must run.
        effective: what this rank's layers would do, by letter.
        begins_every_stage: whether the first of them must choose.
    """
    if not effective:
        return "the loaded model has no attention module that can choose, so the pattern can't take effect"
    for layer, module in sorted(effective.items()):
        if layer >= len(pattern):
            return f"the loaded model has a DSA layer {layer}, the pattern has {len(pattern)} letters"
        if module.role != pattern[layer]:
            return f"letter {layer} would run as {module.role}, the pattern says {pattern[layer]}"
        if module.role in (FULL, CANDIDATES) and not module.has_indexer:
            return f"letter {layer} is {module.role}, but the loaded model has no indexer there"
        if module.unloaded is not None:
            return f"letter {layer} is {module.role}, but no weights were loaded into its indexer's {module.unloaded}"
    if begins_every_stage and effective[min(effective)].role == SHARED:
        first = min(effective)
        return (
            f"letter {first} is the first of its pipeline stage, where nothing was chosen yet: expected"
            f" {pattern.letter}"
        )
    return None


def other_indexers(pattern: Pattern, layers: Collection[int], found: Iterable[Indexer]) -> str | None:
    """One line if indexers of this rank's `layers` would score something else than `pattern` says."""
    wanted = {item.layer: item for item in pattern.indexers if item.layer in layers}
    loaded = {item.layer: item for item in found}
    for layer in sorted({*wanted, *loaded}):
        if wanted.get(layer) != loaded.get(layer):
            return (
                f"the indexer of letter {layer} would run as {loaded.get(layer, 'one that scores everything')}, the"
                f" pattern says {wanted.get(layer, 'that it scores everything')}"
            )
    return None


def prover(asked: Asked, proven: Proven, need: Need = LOAD_MODEL) -> Callable[..., None]:
    """Hook after a method of `ModelRunner`: compare this rank with the pattern, and all ranks with each other.

    Does nothing unless it is the one behind which the family has its roles. Every rank hears of every other's problem
    and ends with the same line.

    Raises:
        ProofError: from the hook, if anything differs.
    """

    def after(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(runner, "is_draft_worker", False) or asked.family.proven_after != need:
            return
        selection = None
        indexers: tuple[Indexer, ...] = ()
        try:
            asked.family.loaded(runner, asked.pattern)
            effective = effective_roles(asked.family, runner.model)
            selection = asked.family.selection(runner.model)
            indexers = asked.family.indexers(runner.model)
            problem = mismatch(asked.pattern, effective, asked.family.begins_every_stage)
            problem = problem or other_indexers(asked.pattern, effective, indexers)
            if problem is None and selection != asked.pattern.selection:
                problem = f"the loaded model would choose by {selection}, the pattern says {asked.pattern.selection}"
        except IndexCacheError as error:  # the other ranks must hear of it, or they wait for this one
            effective, problem = {}, str(error)
        except Exception as error:
            effective, problem = {}, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        roles = "".join(effective[layer].role if layer in effective else "-" for layer in range(len(asked.pattern)))
        report = RankReport(asked.pattern.fingerprint, tuple(sorted(effective)), problem, roles, indexers)
        reports = all_ranks(report)
        problem = disagreement(asked.pattern, reports)
        if problem is not None:
            raise ProofError(problem)
        proof = Proof(read_back(reports, selection), len(effective), len(reports))
        proven.set(proof)
        logger.info(
            "indexcache: serving %s, fingerprint %s, proven on %d attention modules here and %d rank(s)",
            proof.pattern,
            proof.pattern.fingerprint,
            proof.modules,
            proof.ranks,
        )

    return after


def _checkpoint_tensors(indexer: Any) -> Iterator[tuple[str, Any]]:
    """Parameters that every checkpoint has and that can hold NaN; quantisation adds some that have defaults."""
    for name, parameter in indexer.named_parameters():
        if name.endswith(_CHECKPOINT_NAMES) and parameter.data.is_floating_point():
            yield name, parameter


def captured(asked: Asked) -> Callable[..., None]:
    """Hook after `ModelRunner.init_cuda_graphs`: what was captured is the pattern.

    Raises:
        ProofError: from the hook, if it is not.
    """

    def after(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(runner, "is_draft_worker", False):
            asked.family.captured(runner, asked.pattern)

    return after
