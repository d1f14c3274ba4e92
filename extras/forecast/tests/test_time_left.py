"""The share done and the time left of a search while it runs; and who lies to it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexcache_forecast import time_left
from indexcache_forecast.forecast import reckoned
from indexcache_forecast.time_left import TimeLeft, time_words
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.searching.begin import Begun
from indexcache_search.searching.comparison import comparison_lines, evaluated
from scripts.bench.search.simulated import Structure
from tests.search.clocked import ClockedEngine, settings_of

Moment = tuple[float, tuple[float, float] | None, tuple[float, float] | None]  # time, left, share

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Machine(ClockedEngine):
    """A simulated model on a machine with a clock of its own, which `slowness` slows down."""

    now = 0.0
    slowness: Callable[[float], float] = staticmethod(lambda now: 1.0)

    def evaluate(self, *args: Any, **kwargs: Any) -> Iterator[Evaluation]:
        for item in super().evaluate(*args, **kwargs):
            seconds = item.seconds * self.slowness(self.now)
            self.now += seconds / self.lanes
            yield replace(item, seconds=abs(seconds))


class TwoServers(Machine):
    """Servers that evaluate two patterns at once."""

    lanes = 2


class Watched(TimeLeft):
    """Looks ahead for a second of the machine's, however long a machine full of tests really takes."""

    def __init__(self, begun: Begun, engine: Machine) -> None:
        super().__init__(begun, lambda: engine.now)
        self._engine = engine

    def _look(self, until: float) -> None:
        self._engine.now += 1.0
        super()._look(math.inf)


def moments(engine: Machine, folder: Path, strategy: str = "lazy", until: float = math.inf) -> list[Moment]:
    """Run a search up to a time, and return what was known of the rest of it at each evaluation."""
    settings, calibration, held_out = settings_of(strategy), engine.tokens(16), engine.tokens(24, seed=1)
    seen: list[Moment] = []
    with Journal(folder, identity(engine, calibration, held_out, "nll"), today()) as journal:
        begun = Begun(settings, settings.goal(engine.model), engine, calibration, held_out, journal)
        left = Watched(begun, engine)

        def heard(item: Evaluation) -> None:
            left.evaluated(item)
            assert CONTROL.search(str(left)) is None
            seen.append((engine.now, left.left, left.share))
            if engine.now >= until:
                raise KeyboardInterrupt

        try:
            found = begun.search(begun.chooses(heard)).find()
            list(evaluated(comparison_lines(found, engine.model.native, {}), begun.judges(heard)))
        except KeyboardInterrupt:
            pass
    return seen


def hit(seen: list[Moment], first: float, end: float) -> float:
    """Return in which share of the moments from `first` on the bounds held; all must have some."""
    later = [(end - now, left) for now, left, _ in seen if now >= first and now < end]
    assert later and all(left is not None for _, left in later)
    return sum(left is not None and left[0] <= rest + 1 and rest <= left[1] + 1 for rest, left in later) / len(later)


@pytest.mark.parametrize(
    ("kind", "name", "layers", "seed"),
    [
        (Machine, "lazy", 30, 1),
        pytest.param(Machine, "lazy", 47, 2, marks=pytest.mark.slow),
        (TwoServers, "lazy", 30, 3),
        (Machine, "greedy", 16, 4),
        (Machine, "exhaustive", 10, 5),
    ],
)
def test_bounds_of_the_time_left_hold_and_close_in(
    kind: type[Machine], name: str, layers: int, seed: int, tmp_path: Path
) -> None:
    engine = kind(layers, seed, Structure())
    seen = moments(engine, tmp_path, name)
    end = engine.now
    assert hit(seen, 20.0, end) >= 0.9
    lows = [share[0] for now, _, share in seen if share is not None and now > 20]
    assert lows[0] < 0.2 and lows[-1] > 0.9
    _, first, _ = next(item for item in seen if item[0] > 20)
    middle = next(left for now, left, _ in seen if now > end / 2)
    assert first is not None and middle is not None
    assert first[1] < 4 * first[0] and middle[1] - middle[0] < 0.6 * (first[1] - first[0])


def test_a_resumed_run_says_nothing_of_time_by_an_earlier_machines(tmp_path: Path) -> None:
    """It began on a machine four times as fast: until this one has evaluated anything, only the share is known."""
    first = Machine(24, 1, Structure())
    moments(first, tmp_path, until=50.0)
    engine = Machine(24, 1, Structure())
    engine.slowness = lambda now: 4.0
    engine.now = 1000.0
    recorded, ran = list[Moment](), list[Moment]()
    for item in moments(engine, tmp_path):
        (recorded if item[0] == 1000.0 else ran).append(item)
    assert len(recorded) > 10 and all(left is None for _, left, _ in recorded)
    assert hit(ran, 1100.0, engine.now) >= 0.9


def test_a_machine_that_slows_down_is_believed(tmp_path: Path) -> None:
    engine = Machine(24, 2, Structure())
    engine.slowness = lambda now: 1.0 if now < 200 else 3.0
    seen = moments(engine, tmp_path)
    slow = [item for item in seen if item[0] >= 200]
    later = slow[40][0]
    assert hit(slow, later, engine.now) >= 0.8
    assert all(left is None or 0 <= left[0] <= left[1] for _, left, _ in seen)


def test_all_that_a_journal_has_is_read_without_a_word_of_time(tmp_path: Path) -> None:
    engine = Machine(16, 4, Structure())
    moments(engine, tmp_path)
    before, engine.now = (tmp_path / "journal.jsonl").read_bytes(), 0.0
    assert {left for _, left, _ in moments(engine, tmp_path)} == {None}
    assert (tmp_path / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError, AssertionError, ZeroDivisionError])
def test_the_search_goes_on_where_looking_ahead_fails(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*args: Any) -> Any:
        raise error("no")

    whole = len(moments(Machine(16, 4, Structure()), tmp_path / "whole"))
    monkeypatch.setattr(time_left, "reckoned", fails)
    seen = moments(Machine(16, 4, Structure()), tmp_path / "blind")
    assert len(seen) == whole and {item[1:] for item in seen} == {(None, None)}


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_an_estimate_that_is_far_off_never_says_less_than_nothing(
    factor: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(time_left, "reckoned", lambda *args: _scaled(reckoned(*args), factor))
    for _, left, share in moments(Machine(16, 4, Structure()), tmp_path):
        assert left is None or 0 <= left[0] <= left[1]
        assert share is None or 0 <= share[0] <= share[1] <= 1


def _scaled(found: Any, factor: float) -> Any:
    return replace(
        found, search=found.search * factor, held_out=found.held_out * factor, missing=found.missing * factor
    )


def test_looking_ahead_takes_two_percent_of_the_time_and_little_more_at_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, looks = Machine(30, 1, Structure()), list[float]()

    def slow(self: TimeLeft, until: float) -> None:
        looks.append(engine.now)
        engine.now += 1.5

    monkeypatch.setattr(TimeLeft, "_look", slow)
    moments(engine, tmp_path)
    assert len(looks) > 2
    assert all(later - sooner >= min(75, 2 * sooner) for sooner, later in itertools.pairwise(looks))


def test_a_clock_that_goes_backwards_harms_nothing(tmp_path: Path) -> None:
    engine = Machine(16, 4, Structure())
    engine.slowness = lambda now: -1.0 if now > 50 else 1.0
    assert all(left is None or 0 <= left[0] <= left[1] for _, left, _ in moments(engine, tmp_path))


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0, 0.0, "0 s"),
        (0.0, 3.0, "0 to 5 s"),
        (41.0, 62.0, "40 to 65 s"),
        (61.0, 119.0, "1 to 2 min"),
        (119.0, 181.0, "1 to 4 min"),
        (120.0, 120.0, "2 min"),
        (3600.0, 10_000.0, "1 to 3 h"),
        (90_000.0, 260_000.0, "1 to 4 d"),
    ],
)
def test_bounds_are_rounded_outwards(low: float, high: float, words: str) -> None:
    assert time_words(low, high) == words
