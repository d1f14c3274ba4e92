"""What a command does with signals, and with streams that take nothing or little: real processes, small ones."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TOOL = """
import sys, time
from sglang_indexcache import process

mode, path = sys.argv[1:]

def write(text):
    file = open(path, "w")
    file.write(text)
    file.close()  # not where it is deleted, where a signal can't raise

def rest():
    for _ in range(1000):
        time.sleep(0.2)  # Python answers a signal that comes just before a sleep only after it

def work():
    if mode == "imports":
        write("at it")
        rest()
    if mode in ("works", "swallows", "stuck"):
        process.let_work_end()
        try:
            while True:
                try:
                    write("at it")
                    rest()
                except KeyboardInterrupt:
                    if mode == "works":
                        raise
                    if mode == "swallows":
                        raise ImportError("numpy failed to import")
        finally:
            write("closed")
    if mode == "destructor":
        class Thing:
            def __del__(self):
                write("at it")
                rest()
        process.let_work_end()
        Thing()
        rest()
    print("\\u00b1" * 3, "result")
    write("written")
    return int(mode) if mode.isdigit() else None

process.PATIENCE = 1 if mode == "stuck" else 60  # a machine may be slow to close files
process.run("tool", work, resumes=True)
"""
CATCHES_TERM = 1 << (signal.SIGTERM - 1)


def catches(process: subprocess.Popen[Any]) -> bool:
    """Whether a process answers signals itself; Python alone does not answer SIGTERM."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"SigCgt:\s*([0-9a-f]+)", status)
    return found is not None and bool(int(found[1], 16) & CATCHES_TERM)


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A process that answers signals by now, or has ended."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    while process.poll() is None and not catches(process):
        time.sleep(0.001)
    return process


def one_line(stderr: str, code: int, name: str) -> None:
    """Whether it ended as it should: with a line if with an error, and never with a traceback."""
    lines = stderr.splitlines()
    assert "Traceback" not in stderr and len([line for line in lines if line.startswith(name)]) <= 1, stderr
    if code == 128 + signal.SIGPIPE:  # as of any command before `| head`; its progress is on stderr
        assert not [line for line in lines if line.startswith(name)]
    elif code > 128:
        assert len(lines) == 1 and lines[0].startswith(f"{name}: "), stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["imports", "works", "swallows", "stuck", "destructor"])
def test_a_signal_is_a_line_and_an_exit_code(mode: str, number: signal.Signals, tmp_path: Path) -> None:
    """While nothing is under way, while something is, and where the exception is turned into another one or lost."""
    path = tmp_path / "file"
    process = start("-c", TOOL, mode, path)
    while not path.exists() or path.read_text() != "at it":
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    said = "interrupted" if number == signal.SIGINT else "ended by SIGTERM"
    assert stderr == f"tool: {said}; the same command goes on from here\n"
    assert process.returncode == 128 + number
    assert path.read_text() == ("closed" if mode in ("works", "swallows") else "at it")


def test_a_server_gets_signals_and_streams_as_they_were(tmp_path: Path) -> None:
    code = "import signal, sys; before = signal.getsignal(2), signal.getsignal(15), sys.stdout, sys.stderr\n"
    code += "from sglang_indexcache import process; process.begin('tool'); process.hand_over()\n"
    code += "print(before == (signal.getsignal(2), signal.getsignal(15), sys.stdout, sys.stderr))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n"


def test_a_signal_that_was_ignored_stays_so(tmp_path: Path) -> None:
    ignore = "import signal, os, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.executable, sys.argv)"
    process = start("-c", ignore, "-c", TOOL, "0", tmp_path / "file")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == "" and process.returncode == 0


# how a shell starts it -> exit codes after a result, and after one that is 1; what stdout has
NO_LOCALE = "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0"
STREAMS = {
    "plain": ("{}", 0, 1, "±±± result"),
    "stdout closed": ("{} >&-", 0, 1, ""),
    "all closed": ("{} <&- >&- 2>&-", 0, 1, ""),
    "stdout full": ("{} >/dev/full", 2, 1, ""),
    "stderr full": ("{} 2>/dev/full", 0, 1, "±±± result"),
    "stderr closed": ("{} 2>&-", 0, 1, "±±± result"),
    "stdout for reading": ("{} 1</dev/null", 2, 1, ""),
    "a pipe that nobody reads": ("{} | true", 141, 1, ""),
    "ASCII": ("PYTHONIOENCODING=ascii {}", 0, 1, r"\xb1\xb1\xb1 result"),
    "C": (NO_LOCALE + " {}", 0, 1, r"\xb1\xb1\xb1 result"),
    "narrow, no TERM": ("env -u TERM COLUMNS=20 {}", 0, 1, "±±± result"),
}


@pytest.mark.parametrize("state", STREAMS)
def test_streams_that_take_little_or_nothing(state: str, tmp_path: Path) -> None:
    """What is to be written is, and exit codes say what happened."""
    how, after_0, after_1, printed = STREAMS[state]
    for mode, expected in (("0", after_0), ("1", after_1)):
        path = tmp_path / mode
        command = f'"$0" -c "$1" {mode} "$2"'
        if "|" in how:  # the reader has gone before anything is written
            command = f"(sleep 0.3; {command})"
        script = f"set -o pipefail; {how.format(command)}"
        done = subprocess.run(["bash", "-c", script, sys.executable, TOOL, path], capture_output=True, timeout=120)
        assert done.returncode == expected and path.read_text() == "written"
        assert printed in done.stdout.decode()
        told = {"stdout full": "No space left on device", "stdout for reading": "Bad file descriptor"}.get(state)
        assert done.stderr.decode() == ("" if told is None else f"tool: stdout: {told}\n")


def test_a_pipe_that_waits_gets_everything(tmp_path: Path) -> None:
    """Also where the other end was made non-blocking, as terminals are by some programs."""
    code = "from sglang_indexcache import process; process.run('tool', lambda: print('x' * 500_000))"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with subprocess.Popen([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        time.sleep(0.2)
        with os.fdopen(reading, "rb") as file:
            assert len(file.read()) == 500_001
        assert process.wait(120) == 0 and process.stderr is not None and process.stderr.read() == b""


# -- the commands


def moments(count: int, seed: int) -> list[float]:
    """Random moments, seconds after a process began to answer signals."""
    rng = random.Random(seed)
    return [0.0, *(rng.uniform(0, 4) ** 1.5 / 2 for _ in range(count - 1))]


def commands(model: Path, dense: Path, data: Path, folder: Path) -> dict[str, list[object]]:
    """Each command, with little to do."""
    sizes = ["--seq-len", 32, "--device", "cpu", "--output", folder]
    own = ["--model", model, "--num-sequences", 2]
    heads = ["eviction", "--model", dense, "--training", data, "--heads", "query_pages=1", "--seq-len", 120]
    heads += ["--selection", "page_tokens=32,pages=3,recent_pages=2,sink_pages=0", "--device", "cpu"]
    return {
        "indexcache-check": ["sglang_indexcache", "FSFSFS", "--model", model],
        "indexcache-search": ["indexcache_search", *own, "--calibration", data, "--num-eval-sequences", 2, *sizes],
        "indexcache-eval": ["indexcache_search:evaluate", *own, "--evaluation", data, "--pattern", "FSFSFS", *sizes],
        "indexcache-offload": [
            *("indexcache_lab:offload", *own, "--evaluation", data, "--pattern", "FSFSFS", *sizes),
            *("--decode-steps", 8),
        ],
        "indexcache-distill": [
            *(
                "indexcache_train",
                *own,
                "--training",
                data,
                "--warmup",
                "steps=1",
                "--sparse",
                "steps=1",
                *sizes,
            ),
            *("--num-eval-sequences", 2, "--batch-size", 2),
        ],
        "indexcache-lab": [
            *("indexcache_lab", *heads, "--steps", 2, "--num-sequences", 4, "--num-eval-sequences", 2),
            *("--batch-size", 2, "--output", folder),
        ],
    }


def words(command: list[object]) -> list[object]:
    """How Python runs a command, as its console script does."""
    package, _, function = str(command[0]).partition(":")
    if not function:
        return ["-m", package, *command[1:]]
    return ["-c", f"from {package}.__main__ import {function}; {function}()", *command[1:]]


def interrupted_at(name: str, command: list[object], moment: float, number: signal.Signals) -> None:
    process = start(*words(command))
    time.sleep(moment)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode in (0, 128 + number), stderr
    one_line(stderr, process.returncode, name)


NAMES = [f"indexcache-{name}" for name in ("check", "search", "eval", "offload", "distill", "lab")]


@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c_while_modules_load(
    name: str, model_folder: Path, dense_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    command = commands(model_folder, dense_folder, token_file, tmp_path / "out")[name]
    for moment in (0.0, 0.4):
        interrupted_at(name, command, moment, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_signals_at_fifty_moments(
    name: str, model_folder: Path, dense_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    for count, moment in enumerate(moments(50, NAMES.index(name))):
        command = commands(model_folder, dense_folder, token_file, tmp_path / str(count // 5))[name]  # some go on
        interrupted_at(name, command, moment, signal.SIGTERM if count % 3 == 2 else signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", STREAMS)
def test_streams_of_every_command(
    state: str, name: str, model_folder: Path, dense_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    how, expected, _, _ = STREAMS[state]
    folder = tmp_path / "a[b]c [/b] :x:"
    command = commands(model_folder, dense_folder, token_file, folder)[name]
    script = "set -o pipefail; " + how.format('"$0" "$@"')
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, *map(str, words(command))], capture_output=True, timeout=120, text=True
    )
    assert done.returncode == expected, done.stderr
    one_line(done.stderr, done.returncode, name)
    if name != "indexcache-check":
        assert {path.suffix for path in folder.iterdir()} & {".json", ".html"}
