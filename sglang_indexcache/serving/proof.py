"""Proving after loading: every attention module of every rank does what the pattern says, with loaded weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.families.base import SglangAdapter
from sglang_indexcache.families.dsa.blocks.adapter import with_blocks
from sglang_indexcache.io.errors import IndexCacheError, ProofError
from sglang_indexcache.io.messages import NO_INDEXER, NOT_LOADED, WOULD_RUN
from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.pattern.indexer_setting import IndexerSetting
from sglang_indexcache.serving import ranks
from sglang_indexcache.serving.counted import Counter, kinds_of
from sglang_indexcache.serving.preflight import EnginePlan
from sglang_indexcache.serving.proven import Proof
from sglang_indexcache.serving.ranks import RankReport, barrier_all_ranks, disagreement, first_problem, read_back
from sglang_indexcache.sglang.meaning import context_ranks
from sglang_indexcache.sglang.probes import LOAD_MODEL, Need

logger = logging.getLogger(__name__)

_CHECKPOINT_NAMES = (".weight", ".bias", ".weight_scale_inv", ".ape")


@dataclass(frozen=True)
class LoadedRole:
    """The behaviour of a loaded site.

    Attributes:
        role: its letter.
        has_indexer: whether there is an indexer to run.
        unloaded: an indexer parameter that no weight was loaded into, or `None`.
    """

    role: str
    has_indexer: bool
    unloaded: str | None = None


def prepare(adapter: SglangAdapter, model: Any) -> None:
    """Meet the other ranks, and mark indexers before weights are loaded (after `_initialize_model`)."""
    if next(adapter.modules(model), None) is not None:  # draft models have none
        barrier_all_ranks()
        mark_unloaded(adapter, model)


def mark_unloaded(adapter: SglangAdapter, model: Any) -> None:
    """Fill the indexers of F layers with NaN, which loading replaces.

    SGLang does not notice parameters that no weight was loaded into, and runs them as they are.
    """
    for _, _, _, parameter in indexer_tensors(adapter, model):
        parameter.data.fill_(float("nan"))


def indexer_tensors(adapter: SglangAdapter, model: Any) -> Iterator[tuple[int, Any, str, Any]]:
    """Yield site, indexer, name and parameter of the indexer weights of F layers that can hold NaN.

    Every checkpoint has them. Quantisation adds parameters that have defaults, which are left out.
    """
    for site, module in adapter.modules(model):
        indexer = adapter.indexer(module)
        if indexer is not None and adapter.role(site, module) == FULL:
            for name, parameter in indexer.named_parameters():
                if name.endswith(_CHECKPOINT_NAMES) and parameter.data.is_floating_point():
                    yield site, indexer, name, parameter


def current_roles(adapter: SglangAdapter, model: Any) -> dict[int, str]:
    """Return the letter of each site of this rank."""
    return {site: adapter.role(site, module) for site, module in adapter.modules(model)}


def effective_roles(adapter: SglangAdapter, model: Any) -> dict[int, LoadedRole]:
    """Return the behaviour of the loaded sites of this rank."""
    unloaded: dict[int, str] = {}
    for site, _, name, parameter in indexer_tensors(adapter, model):
        if site not in unloaded and parameter.data.float().isnan().any().item():
            unloaded[site] = name
    return {
        site: LoadedRole(adapter.role(site, module), adapter.indexer(module) is not None, unloaded.get(site))
        for site, module in adapter.modules(model)
    }


def mismatch(
    pattern: Pattern, effective: dict[int, LoadedRole], begins_every_stage: bool = False, place: str = "layer"
) -> str | None:
    """Return one line if the loaded layers differ from `pattern`; pipeline stages hold some of the layers only.

    Args:
        pattern: the pattern that must run.
        effective: behaviour of this rank's sites, by letter.
        begins_every_stage: whether the first of them must select.
        place: what a site is called, see `SglangAdapter`.
    """
    if not effective:
        return "the loaded model has no attention module that can choose, so the pattern can't take effect"
    for site, found in sorted(effective.items()):
        if site >= len(pattern):
            return f"the loaded model has {site + 1} layers or more that select, the pattern has {len(pattern)} letters"
        if found.role != pattern[site]:
            return f"{place} {site} {WOULD_RUN} {found.role}, the pattern says {pattern[site]}"
        if found.role == FULL and not pattern.dense and not found.has_indexer:
            return f"{place} {site} is F, but the loaded model has {NO_INDEXER}"
        if found.unloaded is not None:
            return f"{place} {site} is {found.role}, but {NOT_LOADED} {found.unloaded}"
    if begins_every_stage and effective[min(effective)].role == SHARED:
        first = min(effective)
        return (
            f"{place} {first} is the first of its pipeline stage, where nothing was chosen yet: expected"
            f" {pattern.full_role}"
        )
    return None


def other_indexers(pattern: Pattern, sites: Collection[int], found: Iterable[IndexerSetting]) -> str | None:
    """Return one line if indexers of this rank's `sites` would score something else than `pattern` says."""
    wanted = {item.layer: item for item in pattern.indexers if item.layer in sites}
    loaded = {item.layer: item for item in found}
    for site in sorted({*wanted, *loaded}):
        if wanted.get(site) != loaded.get(site):
            return (
                f"the indexer of layer {site} {WOULD_RUN} {loaded.get(site, 'one that scores everything')}, the"
                f" pattern says {wanted.get(site, 'that it scores everything')}"
            )
    return None


def prove(plan: EnginePlan, runner: Any, need: Need = LOAD_MODEL) -> None:
    """Compare this rank with the pattern, and all ranks with each other, after a method of `ModelRunner`.

    It does nothing unless the family has its roles after this method. Every rank gets every other's problem, and all
    end with the same line.

    Raises:
        ProofError: if anything differs.
    """
    if plan.family.sglang.proven_after != need:
        return
    report = look_at(plan, runner, new=True)
    problem = agree(plan, runner, report)
    if problem is not None:
        raise ProofError(problem)
    proof = plan.proven.proof
    logger.info(
        "indexcache: serving %s, fingerprint %s, proven on %d attention modules here and %d rank(s)",
        proof.pattern,
        proof.pattern.fingerprint,
        proof.modules,
        proof.ranks,
    )


def agree(plan: EnginePlan, runner: Any, report: RankReport) -> str | None:
    """Record the proof if all ranks run the pattern; return one line if they don't."""
    reports = ranks.all_ranks(report)
    problem = disagreement(plan.pattern, reports, plan.family.sglang.place)
    if problem is None:
        pattern = read_back(reports, plan.family.sglang.selection(runner.model))
        shared = {layer: ranks for item in reports for layer, ranks in item.shared_rows.items()}
        contexts = {layer: ranks for item in reports for layer, ranks in item.contexts.items()}
        plan.proven.set(Proof(pattern, len(report.layers), len(reports), shared, contexts))
    return problem


def look_at(plan: EnginePlan, runner: Any, new: bool = False) -> RankReport:
    """Report what this rank's loaded model runs; any error is its problem, since the other ranks must know of it.

    Args:
        plan: has the pattern that it must run.
        runner: a `ModelRunner`.
        new: whether SGLang has just loaded it, so that what its configuration could not say is written first.
    """
    adapter, blocks = plan.family.sglang, with_blocks(plan.family.sglang)
    effective: dict[int, LoadedRole] = {}
    indexers: tuple[IndexerSetting, ...] = ()
    shared: Mapping[int, int] = {}
    contexts: Mapping[int, int] = {}
    try:
        if new:
            adapter.loaded(runner, plan.pattern)
            if plan.asked.shard and blocks is not None:
                blocks.share_rows(runner, plan.pattern)
        effective = effective_roles(adapter, runner.model)
        selection = adapter.selection(runner.model)
        if blocks is not None:
            indexers, shared, contexts = blocks.read_back(runner.model)
        problem = mismatch(plan.pattern, effective, adapter.begins_every_stage, adapter.place)
        problem = problem or other_indexers(plan.pattern, effective, indexers)
        sharing = {site for site, found in effective.items() if plan.asked.shard and found.role == FULL}
        if problem is None and set(shared) != sharing:
            site = min(set(shared) ^ sharing)
            problem = f"layer {site} would {'' if site in shared else 'not '}share out the rows of prompts"
        ranks_of_context = context_ranks(runner.server_args) if indexers else 1
        expected = {item.layer: ranks_of_context for item in indexers if ranks_of_context > 1}
        if problem is None and contexts != expected:
            problem = f"blocks would be selected over {contexts} (layers: ranks of a context), expected {expected}"
        if problem is None and selection != plan.pattern.selection:
            problem = f"the loaded model would choose by {selection}, the pattern says {plan.pattern.selection}"
        sizes = {getattr(adapter.indexer(module), "index_topk", None) for _, module in adapter.modules(runner.model)}
        if problem is None and (other := sizes - {None, plan.index_topk}):
            found = min(other, key=str)
            problem = f"the loaded indexers select {found} tokens, the model's index_topk is {plan.index_topk}"
    except Exception as error:
        effective, problem = {}, _line(error)
    roles = "".join(effective[site].role if site in effective else "-" for site in range(len(plan.pattern)))
    return RankReport(
        fingerprint=plan.pattern.fingerprint,
        layers=tuple(sorted(effective)),
        problem=problem,
        roles=roles,
        indexers=indexers,
        shared_rows=shared,
        shard=plan.asked.shard,
        contexts=contexts,
        unions=plan.asked.unions,
        files=plan.weights_sha256,
    )


def count_indexers(plan: EnginePlan, runner: Any, draft: bool) -> None:
    """Count the indexers of a loaded model in its first passes, if its family has them.

    Args:
        plan: has the pattern.
        runner: a `ModelRunner`.
        draft: whether it runs the draft model.
    """
    found = list(plan.family.sglang.attentions(runner.model, plan.pattern, draft))
    if not found:
        return
    if draft:
        counter = Counter(found, "layer of the draft model")
    else:
        selects = plan.selects_after < runner.model_config.context_len
        counter = Counter(found, plan.family.sglang.place, plan.selects_after if selects else None)
    plan.proven.counters.append(counter)
    counter.begin(kinds_of(runner.server_args, draft))


def observe_replays(plan: EnginePlan, runner: Any) -> None:
    """Count the prompts of a loaded model that are replayed in graphs, where these hold whole indexers.

    Args:
        plan: has its counters.
        runner: a `ModelRunner` whose graphs are captured.
    """
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)  # 0.5.15 to 0.5.23
    if graphs is None or graphs is getattr(runner, "eager_runner", None):
        return
    for counter in plan.proven.counters:
        counter.observe_replays(graphs)


def check_captured(plan: EnginePlan, runner: Any) -> None:
    """Check that all ranks captured their CUDA graphs with the pattern (after `ModelRunner.init_cuda_graphs`).

    Raises:
        ProofError: if one did not, on every rank.
    """
    problem, grouped, united, blocks = None, tuple[int, ...](), tuple[int, ...](), with_blocks(plan.family.sglang)
    try:
        plan.family.sglang.captured(runner, plan.pattern)
        if blocks is not None:
            found = blocks.group(runner, plan.pattern, together=not plan.asked.ungrouped, unions=plan.asked.unions)
            grouped = () if found is None else tuple(found.selecting)
            plan.proven.exact = None if found is None else found.exact
            united = () if plan.proven.exact is None else tuple(plan.proven.exact.layers)
    except Exception as error:
        problem = _line(error)
    if not plan.proven.graphs_captured:  # graphs are captured again after an update, where pipeline stages don't meet
        plan.proven.graphs_captured = True
        problem = first_problem(problem)
        every = ranks.all_ranks((grouped, united))
        plan.proven.grouped_layers = sorted({layer for layers, _ in every for layer in layers})
        plan.proven.united_layers = sorted({layer for _, layers in every for layer in layers})
    if problem is not None:
        raise ProofError(problem)


def _line(error: Exception) -> str:
    if isinstance(error, IndexCacheError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
