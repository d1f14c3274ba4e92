"""Launches and loads in one process that should end by themselves, with a line of ours."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.tools.inprocess import call, load_runner


def launch(arguments: Sequence[str], **environment: str) -> tuple[int, list[str]]:
    """Exit code of a launch that should end by itself, and its lines that begin with `indexcache: `."""
    answer: tuple[int, list[str]] = call(_launch, list(arguments), **environment)
    return answer


def _launch(arguments: list[str]) -> tuple[int, list[str]]:
    sys.argv = ["launch_server", *arguments]
    return _ended(lambda: runpy.run_module("sglang_indexcache.launch_server", run_name="__main__", alter_sys=True))


def _ended(run: Callable[[], Any]) -> tuple[int, list[str]]:
    """Exit code of what ends the process, and the lines of ours that it left, on whatever writes to its descriptors."""
    if "TEST_SABOTAGE" in os.environ:
        exec(Path(os.environ["TEST_SABOTAGE"]).read_text(), {})
    with tempfile.TemporaryFile() as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
        try:
            run()
        except SystemExit as end:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
            return int(end.code or 0), [line for line in lines if line.startswith("indexcache: ")]
        output.seek(0)
        raise AssertionError(f"it went on: {output.read()[-1000:].decode(errors='replace')}")


def load(model: Path, **environment: str) -> tuple[int, list[str]]:
    """Like `launch`, of a model runner that should not load `model`."""
    answer: tuple[int, list[str]] = call(_load, model, **environment)
    return answer


def _load(model: Path) -> tuple[int, list[str]]:
    return _ended(lambda: load_runner(model))
