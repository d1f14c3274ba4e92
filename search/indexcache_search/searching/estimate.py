"""What a search will take, from its first minute: `indexcache-search --estimate`.

The search begins as always and is stopped after a minute, which the journal keeps. Then the same strategy runs to its
end on a stand-in for the model, which costs nothing: what the journal has it answers with that, and what it lacks with
sums of single layers' losses, as the first flips measured them. How many sequences that runs, through which layers, is
counted; times of layers that select, of those that share and of the rest are fitted to what was measured.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Engine, Evaluation
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal, recorded
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.searching.comparison import comparison_lines, evaluated
from indexcache_search.searching.matrices import MATRIX_SEQUENCES
from indexcache_search.searching.search import Search
from indexcache_search.strategies import measured_strategies
from indexcache_search.strategies.base import Goal, Strategy
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import SHARED

MINUTE = 60.0
_WEIGHT, _SPREAD = -5.67, 2.05  # logarithm of a layer's cost in nats a token, of the demo (docs/evidence/search.md)
_DIFFERENCE = 0.5  # by which a layer's cost differs from sequence to sequence, likewise
_SHARING = 4  # sequences on which a pattern that shares wherever it can is timed
_ALIKE = 0.03  # evaluations' weight of: a layer that shares takes what one takes that selects
_TURNS = 6  # in which each pattern's prompt is timed on a server
_PASSES = 4  # over the sequences of matrices that these take on transformers; servers measure the overlap alone


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a whole search takes; times in seconds.

    Attributes:
        loading: from the start to the first evaluation.
        search, held_out: of all evaluations, those that are done included.
        matrices: of overlap and similarity.
        prompts: of the times of prompts, which servers measure.
        done: evaluations of this and earlier runs.
        runs: runs of a sequence, in the search and in the comparison.
        model_bytes, journal_bytes: on disk, the journal at its end.
        memory_bytes: of this process and those it started, so far.
        gpu_bytes: likewise of PyTorch here, on a GPU; 0 elsewhere.
    """

    loading: float
    search: float
    held_out: float
    matrices: float
    prompts: float
    done: float
    runs: tuple[int, int]
    model_bytes: int
    journal_bytes: int
    memory_bytes: int
    gpu_bytes: int

    @property
    def seconds(self) -> float:
        """Return what all of it takes, from the start."""
        return self.loading + self.search + self.held_out + self.matrices + self.prompts

    @property
    def left(self) -> float:
        """Return what the search takes from here: it loads the model again, and has what is done."""
        return self.seconds - self.done

    def as_text(self, hourly_price: float | None) -> str:
        """Return the estimate for people, with the cost at a price an hour."""
        search, held_out = self.runs
        lines = [
            f"loading     {_clock(self.loading)}",
            f"search      {_clock(self.search)}  {search} runs of a sequence",
            f"held out    {_clock(self.held_out)}  {held_out} runs of a sequence",
            f"matrices    {_clock(self.matrices)}",
            *([f"prompts     {_clock(self.prompts)}"] if self.prompts else []),
            f"in all      {_clock(self.seconds)}  of which {_clock(self.done).strip()} of evaluations are done",
            f"left        {_clock(self.left)}  loading once more included",
            f"disk        {_size(self.model_bytes)} model, {_size(self.journal_bytes)} journal",
            f"memory      {_size(self.memory_bytes)}" + (f", GPU {_size(self.gpu_bytes)}" if self.gpu_bytes else ""),
        ]
        if hourly_price is not None:
            lines.append(f"cost        {self.seconds / 3600 * hourly_price:,.2f} at {hourly_price:g} an hour")
        return "\n".join(lines)


class _Enough(Exception):  # noqa: N818 (no error)
    """The minute is over."""


class _Timed:
    """An engine that stops after some seconds of evaluations, the last of which is recorded."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self._engine, self._left = engine, seconds

    def evaluate(
        self,
        patterns: Sequence[Any],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        for evaluation in self._engine.evaluate(patterns, data, objective, rows, fresh):
            yield evaluation
            self._left -= evaluation.seconds
            if self._left <= 0:
                raise _Enough


@dataclass(frozen=True)
class _Pace:
    """Seconds of one sequence: of a layer that selects, of one that shares, and of all else, such as the loss."""

    full: float
    shared: float
    rest: float

    @classmethod
    def fitted(cls, evaluations: Sequence[Evaluation], seq_len: int) -> _Pace:
        """Fit to evaluations, each of which counts the same; what these can't tell apart costs the same."""
        counts = np.array([_counts(item, seq_len) for item in evaluations], dtype=np.float64)
        seconds = np.array([max(item.seconds, 1e-6) for item in evaluations])
        layer = seconds.sum() / counts[:, :2].sum()
        alike = np.array([[-1.0, 1.0, 0.0]]) * _ALIKE / layer
        found, _ = nnls(np.vstack([counts / seconds[:, None], alike]), np.append(np.ones(len(seconds)), 0.0))
        return cls(*map(float, found))

    def seconds(self, evaluation: Evaluation, seq_len: int) -> float:
        """Return what an evaluation takes."""
        full, shared, rows = _counts(evaluation, seq_len)
        return self.full * full + self.shared * shared + self.rest * rows


def _counts(evaluation: Evaluation, seq_len: int) -> tuple[int, int, int]:
    """Return how many layers of either kind an evaluation ran, the last ones of each sequence, and its sequences."""
    pattern, full, shared = evaluation.pattern, 0, 0
    assert isinstance(pattern, Pattern)  # a search has no other plans
    for layer_tokens in evaluation.layer_tokens:
        ran = min(layer_tokens // seq_len, len(pattern))
        own = pattern.roles[len(pattern) - ran :].count(SHARED)
        full, shared = full + ran - own, shared + own
    return full, shared, len(evaluation.rows)


class _StandIn:
    """A model whose losses are sums of its layers' costs, and whose evaluations take the measured time.

    Args:
        engine: the engine that it stands for.
        known: what the engine has evaluated of `calibration`.
        calibration: tokens that choose.
        pace: what they take.
    """

    def __init__(self, engine: Engine, known: Sequence[Evaluation], calibration: TokenSet, pace: _Pace) -> None:
        self._native, self._pace = engine.model.native, pace
        self._known: dict[Any, Evaluation] = {}
        self._seen: dict[tuple[str, int], list[Any]] = {}  # patterns by token set and row
        for item in known:
            earlier = self._known.get(item.pattern)
            new = item if earlier is None else item.on([row for row in item.rows if row not in earlier.rows])
            self._known[item.pattern] = new if earlier is None else earlier + new
            for row in item.rows:
                self._seen.setdefault((calibration.sha256, row), []).append(item.pattern)
        whole = engine.model.num_layers * calibration.seq_len
        self._reuses = any(min(item.layer_tokens) < whole for item in known)  # layers below the first difference
        self._calibration = calibration
        self._costs: dict[str, NDArray[np.float64]] = {}

    def evaluate(
        self,
        patterns: Sequence[Any],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """Evaluate as `Engine.evaluate` says."""
        chosen = list(range(data.num_sequences) if rows is None else rows)
        if data.sha256 not in self._costs:
            self._costs[data.sha256] = self._draw(data)
        costs, tokens = self._costs[data.sha256], data.scored.sum(axis=1)
        base = tokens.astype(np.float64)
        if data is self._calibration:
            own_losses = self._known[self._native]
            base[list(own_losses.rows)] = own_losses.losses
        for pattern in patterns:
            own = [layer for layer in pattern.shared_layers if layer not in self._native.shared_layers]
            distances = np.array([layer - pattern.source_layers[layer] for layer in own], dtype=np.float64)
            losses = base + tokens * (distances @ costs[own] if own else 0.0)
            ran = [self._layers(pattern, data, row, fresh) for row in chosen]
            evaluation = Evaluation(
                pattern=pattern,
                rows=tuple(chosen),
                losses=tuple(losses[chosen].tolist()),
                correct=(0,) * len(chosen),
                tokens=tuple(tokens[chosen].tolist()),
                layer_tokens=tuple(layers * data.seq_len for layers in ran),
                seconds=0.0,
            )
            yield replace(evaluation, seconds=self._pace.seconds(evaluation, data.seq_len))

    def _layers(self, pattern: Pattern, data: TokenSet, row: int, fresh: bool) -> int:
        """Return how many layers run: those from the first that no earlier pattern shares."""
        earlier = self._seen.setdefault((data.sha256, row), [])
        shared = 0
        if self._reuses and not fresh:
            shared = max((_common(pattern, other) for other in earlier), default=0)
        earlier.append(pattern)
        return max(1, len(pattern) - shared)

    def _draw(self, data: TokenSet) -> NDArray[np.float64]:
        """Return each layer's cost a token on each sequence, `[layers, sequences]`: measured, or like what was."""
        rng, count = np.random.default_rng(0), len(self._native)
        means = np.exp(_WEIGHT + _SPREAD * rng.standard_normal(count))
        measured = {}
        base = self._known[self._native]
        for layer in self._native.full_layers[1:]:
            flip = self._known.get(self._native.share(layer))
            if flip is not None:
                other = base.on(flip.rows)
                measured[layer] = (sum(flip.losses) - sum(other.losses)) / sum(flip.tokens)
        for layer in range(count):
            if measured:
                means[layer] = measured.get(layer, rng.choice(list(measured.values())))
        noise = rng.standard_normal((count, data.num_sequences))
        return np.asarray(means[:, None] * np.exp(_DIFFERENCE * noise - _DIFFERENCE**2 / 2))


def _common(pattern: Pattern, other: Pattern) -> int:
    """Return the number of layers below the first in which two patterns differ."""
    low, high = 0, len(pattern)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pattern.beginning(middle) == other.beginning(middle) else (low, middle - 1)
    return low


def estimate(
    engine: Engine,
    calibration: TokenSet,
    held_out: TokenSet,
    objective: Objective,
    strategy: Strategy,
    goal: Goal,
    journal: Journal,
    measured: Callable[[str], NDArray[np.float64] | None],
    loading: float,
    model_bytes: int,
    seconds: float = MINUTE,
) -> Estimate:
    """Run the beginning of a search for some `seconds`, and estimate the whole.

    Args:
        engine: evaluates patterns.
        calibration: tokens that choose.
        held_out: tokens that judge.
        objective: what is minimised.
        strategy: how patterns are found.
        goal: its goal.
        journal: keeps what is evaluated.
        measured: matrices of the model by name, which some strategies ask for.
        loading: seconds that loading took.
        model_bytes: size of the model's files.
        seconds: after which the search is stopped.

    Raises:
        IndexCacheError: as the search.
    """
    on_server = isinstance(engine, SglangEngine)
    lanes = engine.lanes if isinstance(engine, SglangEngine) else 1  # that evaluate at once
    timed = Evaluator(_Timed(engine, seconds * lanes), calibration, objective, journal, "calibration")
    with contextlib.suppress(_Enough):
        Search(engine, timed, strategy, goal, measured).find()
    native = engine.model.native
    written = recorded(journal.path)
    done = math.fsum(item.seconds for _, item in written)
    known = [item for part, item in written if part == "calibration"]
    fewest = native.keeping(native.full_layers[:1])
    sharing = list(engine.evaluate([fewest], calibration, objective, known[0].rows[:_SHARING]))
    pace = _Pace.fitted([*known, *sharing], calibration.seq_len)
    a_sequence = pace.full * len(native.full_layers) + pace.shared * len(native.shared_layers) + pace.rest
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(journal.path, folder)
        names = identity(engine, calibration, held_out, objective)
        with Journal(Path(folder), names, today()) as copy:
            model = _StandIn(engine, known, calibration, pace)
            chooses = Evaluator(model, calibration, objective, copy, "calibration")
            found = Search(engine, chooses, strategy, goal, lambda name: _matrix(name, len(native))).find()
            judges = Evaluator(model, held_out, "nll", copy, "held-out")
            rules = [] if on_server else measured_strategies(native.dense)  # servers measure none of their matrices
            lines = comparison_lines(found, native, {rule.name: _matrix(rule.name, len(native)) for rule in rules})
            list(evaluated(lines, judges))
            search, compared = chooses.cost, judges.cost
            records = len(recorded(copy.path))
    sample = min(MATRIX_SEQUENCES, calibration.num_sequences) * (1 if on_server else _PASSES)
    prompts = _TURNS * (1 + len(found.patterns)) * a_sequence
    memory, gpu = _memory()
    return Estimate(
        loading=loading,
        search=search.seconds / lanes,
        held_out=compared.seconds / lanes,
        matrices=sample * a_sequence,
        prompts=prompts if on_server else 0.0,
        done=done / lanes,
        runs=(search.sequences, compared.sequences),
        model_bytes=model_bytes,
        journal_bytes=math.ceil(journal.path.stat().st_size * records / len(written)),
        memory_bytes=memory,
        gpu_bytes=gpu,
    )


def _matrix(name: str, layers: int) -> NDArray[np.float64]:
    """Return a matrix that was not measured: patterns chosen by it cost what others cost."""
    return np.random.default_rng(0).random((1 if name == "shift" else layers, layers))


def _memory() -> tuple[int, int]:
    """Return the bytes of this process and its children, and those of PyTorch on a GPU at most."""
    import psutil
    import torch

    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def size_of(model: str) -> int:
    """Return the bytes of a model's files, in its folder or in the cache of the hub; 0 if they are not here."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        name, _, revision = model.partition("@")
        try:
            folder = Path(snapshot_download(name, revision=revision or None, local_files_only=True))
        except (OSError, ValueError):
            return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _clock(seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds))!s:>9}"


def _size(number: int) -> str:
    unit, name = next((item for item in ((1e9, "GB"), (1e6, "MB")) if number >= item[0] / 10), (1e3, "kB"))
    return f"{number / unit:.1f} {name}"
