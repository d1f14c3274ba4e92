"""Commands as forks of one process that has imported what they import: that alone takes each 12 seconds otherwise.

All else is as elsewhere: words, environment, streams, signals and exit codes. Whether a command starts from nothing is
tested in tests/core/test_process.py and tests/package/.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from scripts.tools.inprocess import new_thread_pool

_IMPORTED = ["datasets", "matplotlib.backends.backend_svg", "indexcache_train.distill.run"]
_IMPORTED += ["indexcache_search.searching.run", "indexcache_report.search"]


def fork_server() -> ForkServerContext:
    """The one of this process: what it has imported when it starts, everything that it forks has."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_IMPORTED)
    return server


def forked(
    module: str, words: Sequence[object], *, stdout: str = os.devnull, stderr: str = os.devnull, **environment: str
) -> BaseProcess:
    """Start `python -m module words`; what it prints goes to the end of these files."""
    everything = {**os.environ, **environment}
    process = fork_server().Process(target=_run, args=(module, [*map(str, words)], stdout, stderr, everything))
    process.start()
    return process


def killed_at(process: BaseProcess, file: Path, lines: int, delay: float = 0.0) -> None:
    """Kill a process `delay` seconds after a file has grown to so many lines."""
    while process.exitcode is None and (not file.exists() or file.read_bytes().count(b"\n") < lines):
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    process.join()


def _run(module: str, words: list[str], stdout: str, stderr: str, environment: dict[str, str]) -> None:
    for descriptor, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=environment.get("PYTHONIOENCODING"))  # type: ignore[union-attr]
    new_thread_pool()
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
