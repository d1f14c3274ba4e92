"""Plans for keys beside each other: differences at some thresholds, and what else saves as much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from indexcache_search import estimates
from indexcache_search.compare import result
from indexcache_search.compare.held_out import HeldOut
from indexcache_search.compare.measure import patterns
from indexcache_search.compare.run import Data, Runtime, built_of, calibrated_on, named_lines
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Evaluation
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.estimates import Estimate
from indexcache_search.evaluator import Evaluator
from indexcache_search.hf.loading import check_seq_len, describe_model, read_config, set_quiet
from indexcache_search.identity import engine_identity, engine_words, today
from indexcache_search.journal import Journal
from indexcache_search.lab.key_delta.file import KeyFile
from indexcache_search.lab.key_delta.plan import BLOCK, SINKS, STAGES, KeyMethod, KeyPlan, Stage
from indexcache_search.lab.key_delta.runs import in_stage, read_tokens
from indexcache_search.line import BASELINE, NAMED, Line
from indexcache_search.names import file_names
from indexcache_search.objectives import Objective
from indexcache_search.owned.outputs import Outputs, outputs
from indexcache_search.plans import Plan
from indexcache_search.progress import bar
from indexcache_search.results import ComparisonResult, Row
from sglang_indexcache import ModelLayers
from sglang_indexcache.selection import Selection
from sglang_indexcache.spec import PatternSpec, split_name

BITS = (8, 4)


@dataclass(frozen=True)
class Asked:
    """A threshold for all layers, or those of a file; it waits for a model.

    Attributes:
        thresholds: either.
        near: `window`, `max_window` and `recent` of a `KeyPlan`, in the place of its own or of the file's.
        text: as it was written.
    """

    thresholds: float | KeyFile
    near: Mapping[str, Any]
    text: str

    def plan(self, model: ModelLayers) -> KeyPlan:
        """For `model`.

        Raises:
            SearchError: if the file is of another one, or a value is not a threshold.
        """
        if isinstance(self.thresholds, KeyFile):
            return replace(self.thresholds.for_model(model), **self.near)
        return KeyPlan(method="key_delta", values=(self.thresholds,) * model.num_layers, **self.near)


@dataclass(frozen=True, kw_only=True)
class KeyCandidates:
    """What is compared.

    Attributes:
        asked: plans of `key_delta`, see `asked_for`.
        patterns: of the dense model, as `spec.PatternSpec`, with `NAME=` before it if it is to have one.
        retentions: what is compared of files that name none.
        selections: see `compare.run.Candidates`.
        rivals: whether sinks and a window, blocks, and keys of 8 and 4 bits stand beside them, at equal savings.
    """

    asked: tuple[Asked, ...]
    patterns: tuple[str, ...] = ()
    retentions: tuple[Fraction, ...] = ()
    selections: tuple[Selection, ...] = ()
    rivals: bool = True

    @property
    def files(self) -> list[str]:
        """Paths of the files that hold thresholds."""
        return [item.text for item in self.asked if isinstance(item.thresholds, KeyFile)]


def asked_for(thresholds: str, near: Mapping[str, Any]) -> tuple[Asked, ...]:
    """Numbers and files with commas between them; `near` as of `Asked`.

    Raises:
        SearchError: if one is neither a number nor a file.
    """
    asked = []
    for word in (item.strip() for item in thresholds.split(",")):
        try:
            asked.append(Asked(float(word), near, word))
        except ValueError:
            if not Path(word).exists():
                raise SearchError(f"--threshold: {word[:60]!r} is neither a number nor a file") from None
            asked.append(Asked(KeyFile.load(Path(word)), near, word))
    return tuple(asked)


def run(
    model: str, candidates: KeyCandidates, data: Data, runtime: Runtime, output: Path, restart: bool, console: Console
) -> ComparisonResult | None:
    """Compare on held-out data, and write eval.json and eval.html; see `compare.run.run`.

    Texts count behind their first quarter, and are read at once; replies are decoded.

    Raises:
        IndexCacheError: if something asked for can't be done.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    set_quiet()
    reads = {"--model": [model], "--pattern": file_names(candidates.patterns), "--threshold": candidates.files}
    command = "indexcache-eval --attention key_delta"
    with outputs(command, output, output / "work", result.FILES, {**reads, **data.reads()}) as out:
        comparison = _run(model, candidates, data, runtime, out, restart, console)
        if comparison is not None:
            out.replace(result.texts(comparison), console)
    return comparison


def _run(
    model: str, candidates: KeyCandidates, data: Data, runtime: Runtime, out: Outputs, restart: bool, console: Console
) -> ComparisonResult | None:
    seq_len = data.seq_len or 512
    description, config = dense_model(model, seq_len), read_config(model)
    check_seq_len(seq_len, config)
    plans = [item.plan(description) for item in candidates.asked]
    given = candidates.selections[0] if candidates.selections else None
    specs = [
        (name, PatternSpec.read(text, given, description.native.selection))
        for name, text in map(split_name, candidates.patterns)
    ]
    files = [item.thresholds for item in candidates.asked if isinstance(item.thresholds, KeyFile)]
    calibrated = [*(file.calibrated_on() for file in files), *calibrated_on(specs)]
    built = built_of(model, description, config.vocab_size, data, seq_len, calibrated, "plan", console)
    if data.only_shown:
        return None
    count = Counter(plan.name for plan in plans)
    lines = [
        Line(NAMED, plan.name if count[plan.name] == 1 else f"{plan.name} ({item.text})", None, plan)
        for item, plan in zip(candidates.asked, plans, strict=True)
    ]
    lines += named_lines(specs, candidates.retentions, candidates.selections, description)
    count = Counter(f"{line.name} {line.retention or ''}".strip() for line in lines)
    twice = next((name for name, number in count.items() if number > 1), None)
    if twice is not None:
        raise SearchError(f"two plans are called {twice!r}, expected each --threshold and --pattern once")
    engine = load_engine(model, description, runtime.device, runtime.dtype, runtime.batch_size, runtime.prefix_cache_gb)
    identity = {**engine_identity(engine), "held-out": built.data.sha256}
    with (
        Journal(out.journal(), identity, today(), restart) as journal,
        bar(console) as progress,
    ):
        task = progress.add_task("plans", total=None)
        rivalled = [line.pattern for line in lines] if candidates.rivals else []
        comparison = compare(engine, built, journal, lines, rivalled, lambda: progress.advance(task))
    engine.check_unchanged()
    return comparison


def dense_model(model: str, seq_len: int) -> ModelLayers:
    """What config.json says of a dense model; texts count behind the first quarter of a sequence.

    Raises:
        SearchError: if the model has indexers.
        ModelConfigError: if it is of no known family.
    """
    description = describe_model(model)
    if not description.dense:
        raise SearchError(f"{model} has indexers that choose; key_delta is for dense models")
    return replace(description, first_sparse_position=seq_len // 4)


def load_engine(
    model: str, description: ModelLayers, device: str, dtype: str, batch_size: int, prefix_cache_gb: float
) -> TransformersEngine:
    """The reference engine, for what `dense_model` says."""
    selection = description.native.selection
    engine = TransformersEngine.load(model, device, dtype, batch_size, prefix_cache_gb, "naive", selection)
    engine.model = description
    return engine


def compare(
    engine: TransformersEngine,
    built: HeldOut,
    journal: Journal,
    lines: Sequence[Line],
    rivalled: Sequence[Plan | None],
    done: Callable[[], None] = lambda: None,
) -> ComparisonResult:
    """Evaluate `lines`, and what leaves out as much as those of `rivalled` that are plans for keys."""
    data = built.data
    losses = Evaluator(engine, data, "nll", journal, "nll", lambda item: done())
    divergences = Evaluator(engine, data, "kl", journal, "kl")
    costs: dict[Stage, Costs] = {stage: Costs(engine, data, journal, stage) for stage in STAGES}
    compared = patterns(losses, divergences, lines, built)
    more = _rivals(rivalled, costs[main_stage(data)])
    if more:
        compared += patterns(losses, divergences, more, built)[1:]
    comparison = result.collect(
        compared,
        built,
        engine.model.first_sparse_position,
        model=engine.model.name,
        engine=engine_words(engine),
        seq_len=data.seq_len,
    )
    rows = [
        _with_cost(row, line.row.line.pattern, costs)
        for row, line in zip(comparison.held_out.rows, compared, strict=True)
    ]
    return comparison.model_copy(update={"held_out": comparison.held_out.model_copy(update={"rows": rows})})


def _with_cost(row: Row, plan: Plan | None, costs: dict[Stage, Costs]) -> Row:
    assert plan is not None
    nothing = row.kind == BASELINE
    skipped = {
        stage: Estimate(0.0, 0.0) if nothing else cost.skipped(plan) for stage, cost in costs.items() if cost.rows
    }
    return row.model_copy(update={"skipped": skipped})


class Costs:
    """How many products of queries with keys plans leave out while prompts are read, or replies decoded.

    `part` goes before the stage in the journal.

    Attributes:
        stage: which of the two.
        counted: `[sequences, tokens]`, the tokens in it.
        rows: the sequences that have such tokens.
    """

    def __init__(
        self, engine: TransformersEngine, data: TokenSet, journal: Journal, stage: Stage, part: str = ""
    ) -> None:
        self.stage, self.counted, self._data = stage, in_stage(read_tokens(data), stage), data
        self.rows = [int(row) for row in np.flatnonzero(self.counted.any(axis=1))]
        self._evaluator = Evaluator(_Counting(engine, stage), data, "nll", journal, f"{part}{stage}")  # type: ignore[arg-type]

    def skipped(self, plan: Plan) -> Estimate:
        """The share that `plan` leaves out."""
        done = self._evaluator.evaluations([plan], self.rows)[0]
        computed = estimates.loss(done, self._data)
        return Estimate(1.0 - computed.mean, computed.stderr)


class _Counting:
    """An engine whose loss is what is computed, and whose tokens are what attention to everything computes."""

    def __init__(self, engine: TransformersEngine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage

    def evaluate(
        self, plans: Sequence[Plan], data: TokenSet, objective: Objective, rows: Sequence[int], fresh: bool = False
    ) -> Iterator[Evaluation]:
        for plan in plans:
            pairs = [self._engine.key_runs.work(plan, row, data, self._stage) for row in rows]
            none = (0,) * len(rows)
            computed, everything = tuple(float(pair[0]) for pair in pairs), tuple(pair[1] for pair in pairs)
            yield Evaluation(plan, tuple(rows), computed, none, everything, none, 0.0)


def main_stage(data: TokenSet) -> Stage:
    """The stage that more tokens are in."""
    return "reading" if read_tokens(data).mean() >= 0.5 else "decoding"


def _rivals(plans: Sequence[Plan | None], costs: Costs) -> list[Line]:
    """What leaves out as much as each plan of differences; and keys in few bits."""
    of_keys, lines = [plan for plan in plans if isinstance(plan, KeyPlan)], []
    for plan in of_keys:
        skipped = costs.skipped(plan).mean
        lines.append(_rival(plan, "sink_window", float(window_of(skipped, costs.counted))))
        lines.append(_rival(plan, "key_blocks", share_of(skipped, costs.counted)))
    lines += [_rival(plan, "key_bits", float(bits)) for plan in of_keys[:1] for bits in BITS]
    return list(dict.fromkeys(lines))


def _rival(plan: KeyPlan, method: KeyMethod, value: float) -> Line:
    rival = replace(plan, method=method, values=(value,) * len(plan.values))
    return Line(NAMED, rival.name, None, rival)


def window_of(skipped: float, counted: NDArray[np.bool_]) -> int:
    """The window that leaves out about `skipped` of all pairs of a query and a key; `counted` are the queries."""
    visible, times = _visible(counted)

    def left(window: int) -> float:
        seen = np.minimum(visible, window) + np.minimum(SINKS, np.maximum(visible - window, 0))
        return float((seen * times).sum() / (visible * times).sum())

    return min(range(1, int(visible.max()) + 1), key=lambda window: abs(left(window) - (1 - skipped)))


def share_of(skipped: float, counted: NDArray[np.bool_]) -> float:
    """The share of the blocks that leaves out about `skipped` of all pairs; to three digits."""
    visible, times = _visible(counted)
    blocks = -(-visible // BLOCK)

    def left(share: float) -> float:
        wanted = np.minimum(np.maximum(np.ceil(blocks * share - 1e-6), 3), blocks)
        seen = (wanted - 1) * BLOCK + (visible - 1) % BLOCK + 1  # a query's own block is one of them
        return float((seen * times).sum() / (visible * times).sum())

    return min((number / 1000 for number in range(1, 1001)), key=lambda share: abs(left(share) - (1 - skipped)))


def _visible(counted: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many keys queries see, and how many queries see so many."""
    return np.unique(np.nonzero(counted)[1] + 1, return_counts=True)
