"""Forecast of what a search will take, from its first minute: `indexcache-search --estimate`.

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
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.text import Text

from indexcache_search.engines.base import OVERLAP, Engine, TimesPrompts
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal, recorded
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.searching.begin import Begun, begun
from indexcache_search.searching.comparison import comparison_lines, evaluated
from indexcache_search.searching.job import SearchJob
from indexcache_search.searching.matrices import MATRIX_SEQUENCES
from indexcache_search.searching.search import Search
from indexcache_search.searching.stand_in import Pace, StandIn
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

    def evaluate(self, *args: Any, **settings: Any) -> Iterator[Evaluation]:
        for evaluation in self._engine.evaluate(*args, **settings):
            yield evaluation
            self._left -= evaluation.seconds
            if self._left <= 0:
                raise _Enough


def forecast(job: SearchJob, seconds: float = MINUTE) -> Forecast:
    """Run the first minute of a search, which its journal keeps, and estimate what all of it takes.

    Raises:
        IndexCacheError: as `run.run`.
    """
    with begun(job) as (search, _), error_context("measuring the first minute"):
        loading = time.time() - psutil.Process().create_time()
        with job.console.status(Text(f"Measuring for {seconds:.0f} seconds")):
            return forecast_of(search, loading=loading, model_bytes=size_of(job.model), seconds=seconds)


def forecast_of(begun: Begun, *, loading: float = 0.0, model_bytes: int = 0, seconds: float = MINUTE) -> Forecast:
    """Run a search for some `seconds`, and estimate the whole.

    Args:
        begun: the search.
        loading: seconds that loading took.
        model_bytes: size of the model's files.
        seconds: after which the search is stopped.

    Raises:
        IndexCacheError: as the search.
    """
    engine, calibration, journal = begun.engine, begun.calibration, begun.journal
    native, lanes = engine.model.native, engine.lanes
    with contextlib.suppress(_Enough):
        begun.search(begun.chooses(engine=_Timed(engine, seconds * lanes))).find()
    written = recorded(journal.path)
    done = math.fsum(item.seconds for _, item in written)
    known = [item for part, item in written if part == "calibration"]
    fewest = native.keeping(native.full_layers[:1])
    sharing = list(engine.evaluate([fewest], calibration, begun.settings.objective, known[0].rows[:_SHARING]))
    pace = Pace.fitted([*known, *sharing], calibration.seq_len)
    a_sequence = pace.full * len(native.full_layers) + pace.shared * len(native.shared_layers) + pace.rest
    rules = [rule for rule in measured_strategies(native.dense) if rule.name in engine.measures]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(journal.path, folder)
        names = identity(engine, calibration, begun.held_out, begun.settings.objective)
        with Journal(Path(folder), names, today()) as copy:
            model, again = StandIn(begun, known, pace), replace(begun, journal=copy)
            chooses, judges = again.chooses(engine=model), again.judges(engine=model)
            matrix = partial(_matrix, layers=len(native))
            found = Search(engine, chooses, begun.settings.strategy, begun.goal, matrix).find()
            lines = comparison_lines(found, native, {rule.name: matrix(rule.name) for rule in rules})
            list(evaluated(lines, judges))
            search, compared = chooses.cost, judges.cost
            records = len(recorded(copy.path))
    sample = min(MATRIX_SEQUENCES, calibration.num_sequences) * (_PASSES if engine.measures - {OVERLAP} else 1)
    memory, gpu = _memory()
    return Forecast(
        loading=loading,
        search=search.seconds / lanes,
        held_out=compared.seconds / lanes,
        matrices=sample * a_sequence,
        prompts=_TURNS * (1 + len(found.patterns)) * a_sequence if isinstance(engine, TimesPrompts) else 0.0,
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
