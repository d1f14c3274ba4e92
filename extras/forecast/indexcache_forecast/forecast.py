"""Forecast of what a search will take, from its first minute: `indexcache-search --estimate`.

The search begins as always and is stopped after a minute, which the journal keeps. Then the same strategy runs to its
end on a stand-in for the model, which costs nothing: what the journal has it answers with that, and what it lacks with
sums of single layers' losses, as the first flips measured them. How many sequences that runs, through which layers, is
counted; times of layers that select, of those that share and of the rest are fitted to what was measured.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.text import Text

from indexcache_forecast.stand_in import Draft, Pace, StandIn
from indexcache_search.engines.base import OVERLAP, TimesPrompts
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.searching.begin import Begun, begun
from indexcache_search.searching.comparison import comparison_lines, evaluated
from indexcache_search.searching.job import SearchJob
from indexcache_search.searching.matrices import MATRIX_SEQUENCES
from indexcache_search.searching.search import Search
from indexcache_search.strategies import measured_strategies
from sglang_indexcache.command_line import error_context

MINUTE = 60.0
_SHARING = 4  # sequences on which a pattern that shares wherever it can is timed
_TURNS = 6  # in which each pattern's prompt is timed on a server
_PASSES = 4  # over the sequences of matrices that these take, unless the overlap is the only one


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Cost of a whole search; times in seconds.

    Attributes:
        loading: from the start to the first evaluation.
        search, held_out: of all evaluations, those that are done included.
        matrices: of overlap and similarity.
        prompts: of the times of prompts, which servers measure.
        done: evaluations of this and earlier runs.
        missing: what the journal has not of all but `loading`.
        runs: runs of a sequence, in the search and in the comparison.
        model_bytes, journal_bytes: on disk, the journal at its end.
        memory_bytes: of this process and those it started, so far.
        gpu_bytes: likewise of PyTorch here, on a GPU; 0 elsewhere.
    """

    loading: float = 0.0
    search: float
    held_out: float
    matrices: float
    prompts: float
    done: float
    missing: float = 0.0
    runs: tuple[int, int]
    model_bytes: int = 0
    journal_bytes: int
    memory_bytes: int = 0
    gpu_bytes: int = 0

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


def forecast(job: SearchJob, seconds: float = MINUTE) -> Forecast:
    """Run the first minute of a search, which its journal keeps, and estimate what all of it takes.

    Raises:
        IndexCacheError: as `run.run`.
    """
    with begun(job) as (search, _), error_context("measuring the first minute"):
        loading = time.time() - psutil.Process().create_time()
        with job.console.status(Text(f"Measuring for {seconds:.0f} seconds")):
            return replace(forecast_of(search, seconds), loading=loading, model_bytes=size_of(job.model))


def forecast_of(begun: Begun, seconds: float = MINUTE) -> Forecast:
    """Run a search until its evaluations took some `seconds`, and estimate the whole, without loading and the model.

    Raises:
        IndexCacheError: as the search.
    """
    import torch

    engine, calibration, journal, native = begun.engine, begun.calibration, begun.journal, begun.engine.model.native
    left, records = seconds * engine.lanes, journal.records

    def heard(item: Evaluation) -> None:
        nonlocal left, records
        left, records = left - item.seconds * (journal.records > records), journal.records  # only those of this run
        if left <= 0:
            raise _Enough

    with contextlib.suppress(_Enough):
        begun.search(begun.chooses(heard)).find()
    known = journal.known("calibration")
    fewest = native.keeping(native.full_layers[:1])
    sharing = list(engine.evaluate([fewest], calibration, begun.settings.objective, known[0].rows[:_SHARING]))
    found = reckoned(begun, Pace.fitted([*known, *sharing], calibration.seq_len))
    own, memory = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            memory += process.memory_info().rss
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return replace(found, memory_bytes=memory, gpu_bytes=gpu)


def reckoned(begun: Begun, pace: Pace, seed: int = 0, until: float = math.inf) -> Forecast:
    """Run a search to its end on a stand-in, see there, and return what it takes, without loading and memory."""
    engine, calibration, journal, draft = begun.engine, begun.calibration, begun.journal, Draft(begun.journal)
    native, lanes, known = engine.model.native, engine.lanes, journal.known("calibration")
    model, again = StandIn(begun, known, pace, seed, until), replace(begun, journal=draft)
    chooses, judges = again.chooses(engine=model), again.judges(engine=model)

    def matrix(name: str) -> NDArray[np.float64]:
        """Return a matrix; patterns chosen by one that was not measured cost what others cost."""
        shape = (1 if name == "shift" else len(native), len(native))
        measured = begun.matrices.known(name)
        return np.random.default_rng(seed).random(shape) if measured is None else measured

    found = Search(engine, chooses, begun.settings.strategy, begun.goal, matrix).find()
    rules = [rule.name for rule in measured_strategies(native.dense) if rule.name in engine.measures]
    list(evaluated(comparison_lines(found, native, {name: matrix(name) for name in rules}), judges))
    search, compared = chooses.cost, judges.cost
    a_sequence = pace.full * len(native.full_layers) + pace.shared * len(native.shared_layers) + pace.rest
    sample = min(MATRIX_SEQUENCES, calibration.num_sequences) * (_PASSES if engine.measures - {OVERLAP} else 1)
    unmeasured = OVERLAP in engine.measures and begun.matrices.known(OVERLAP) is None
    prompts = _TURNS * (1 + len(found.patterns)) * a_sequence if isinstance(engine, TimesPrompts) else 0.0
    return Forecast(
        search=search.seconds / lanes,
        held_out=compared.seconds / lanes,
        matrices=sample * a_sequence,
        prompts=prompts,
        done=math.fsum(item.seconds for item in (*known, *journal.known("held-out"))) / lanes,
        missing=model.seconds / lanes + prompts + (sample * a_sequence if unmeasured else 0.0),
        runs=(search.sequences, compared.sequences),
        journal_bytes=math.ceil(journal.path.stat().st_size * draft.records / journal.records),
    )


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
