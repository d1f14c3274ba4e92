"""What a search says while it runs: the phase, the time, the best pattern."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from indexcache_search.cli.search import app
from indexcache_search.console import messages
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.searching import progress
from indexcache_search.searching.begin import Begun
from indexcache_search.searching.progress import SearchProgress
from scripts.bench.search.simulated import Structure
from tests.search.clocked import ClockedEngine, settings_of
from tests.search.test_search import arguments

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begun]:
    engine, settings = ClockedEngine(78, 1, Structure()), settings_of("lazy")
    calibration, held_out = engine.tokens(4), engine.tokens(4, seed=1)
    with Journal(tmp_path, identity(engine, calibration, held_out, "nll"), today()) as journal:
        yield Begun(settings, settings.goal(engine.model), engine, calibration, held_out, journal)


def run_some(begun: Begun, shown: SearchProgress) -> None:
    chooses, native = begun.chooses(shown.evaluated), begun.engine.model.native
    shown.begin("baseline")
    chooses.evaluations([native])
    chooses.evaluations([native.share(3)], [0, 1])
    chooses.evaluations([native.share(layer) for layer in (3, 5)])


@pytest.mark.parametrize("width", [20, 80])
def test_a_terminal_of_any_width_shows_all_of_it(width: int, begun: Begun) -> None:
    console = Console(file=Terminal(), width=width, force_terminal=True, _environ={"TERM": "xterm"})
    with SearchProgress(console, begun) as shown:
        run_some(begun, shown)
        lines = ["".join(part.text for part in line) for line in console.render_lines(shown._screen(), pad=False)]
    assert max(map(len, lines)) <= width and lines.pop().strip("\u2501\u2578\u257a") == ""
    text = "".join(lines)
    better = min((begun.chooses().recorded(begun.goal.native.share(layer)) for layer in (3, 5)), key=_loss)
    for words in ("search at 1/2 (2 of 4)", "time left not known", f"best with 77 of 78 F: {better.pattern}", "nll +"):
        assert words.replace(" ", "") in text.replace(" ", ""), text
    assert console.file.getvalue().count("\x1b[?25l") == console.file.getvalue().count("\x1b[?25h") == 1  # type: ignore[attr-defined]


def _loss(item: Any) -> float:
    return float(sum(loss / tokens for loss, tokens in zip(item.losses, item.tokens, strict=True)))


@pytest.mark.parametrize(
    ("file", "environment"),
    [
        (io.StringIO, {}),
        (io.StringIO, {"FORCE_COLOR": "1"}),
        (io.StringIO, {"TTY_COMPATIBLE": "1", "GITHUB_ACTIONS": "true"}),
        (Terminal, {"TERM": "dumb"}),
        (Terminal, {"TERM": "dumb", "NO_COLOR": "1"}),
    ],
)
def test_a_log_gets_lines_without_control_characters(
    file: type[io.StringIO], environment: dict[str, str], begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.01)
    console = Console(file=file(), width=80, highlight=False, markup=False, _environ=environment)
    with SearchProgress(console, begun) as shown:
        shown._over.wait(0.05)  # before the first phase nothing is said
        run_some(begun, shown)
        ticks = [shown._over.wait(0.05) for _ in range(3)]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert not any(ticks) and CONTROL.search(text) is None
    first, *_, last = text.splitlines()
    assert first == "baseline (1 of 4): running for 0:00:00, time left not known"
    assert any(line.startswith("search at 1/2 (2 of 4): running for 0:00:00") for line in text.splitlines())
    assert re.fullmatch(
        r"search at 1/2 \(2 of 4\): running for .*; best with 77 of 78 F: [FS]{78}, nll \+\d+\.\d{4} nats a token", last
    )


def test_ascii_alone_is_enough(begun: Begun) -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, "ascii", "strict"), width=80)
    with SearchProgress(console, begun) as shown:
        run_some(begun, shown)
        console.print(shown._screen())
    assert b"(2 of 4)" in raw.getvalue()


def test_a_quiet_console_costs_nothing(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    with SearchProgress(messages(quiet=True), begun) as shown:
        monkeypatch.setattr(type(shown._time), "evaluated", lambda *args: pytest.fail("reckoned"))
        run_some(begun, shown)


def test_a_reader_that_goes_away_does_not_end_the_work() -> None:
    code = (
        "from indexcache_search.console import messages\nfor _ in range(9): messages().print('x' * 9999)\nprint('done')"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writer, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_search_tells_its_phases_in_a_log(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(model_folder, token_file, tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert CONTROL.search(done.stderr) is None
    told = re.findall(r"^(.*) \((\d) of 4\): (?:running for|.* done in) \d:\d\d:\d\d, ", done.stderr, re.MULTILINE)
    assert told == [
        ("baseline", "1"),
        ("search at 1/2", "2"),
        ("overlap and similarity", "3"),
        ("held-out comparison", "4"),
    ]
