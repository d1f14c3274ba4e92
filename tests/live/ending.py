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
from sglang_indexcache.sglang.probes import SglangSource
from tests.live.forked import sabotaged


def launch(arguments: Sequence[str], **environment: str) -> tuple[int, list[str]]:
    """Exit code of a launch that should end by itself, and its lines that begin with `indexcache: `."""
    answer: tuple[int, list[str]] = call(_launch, list(arguments), **environment)
    return answer


def _launch(arguments: list[str]) -> tuple[int, list[str]]:
    sys.argv = ["launch_server", *arguments]
    return _ended(lambda: runpy.run_module("sglang_indexcache.launch_server", run_name="__main__", alter_sys=True))


def _ended(run: Callable[[], Any]) -> tuple[int, list[str]]:
    """Exit code of what ends the process, and the lines of ours that it left, on whatever writes to its descriptors."""
    sabotaged(spawned=False)
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


def changed_source(module: str, change: Callable[[str], str], folder: Path) -> dict[str, str]:
    """The environment of a launch that finds an SGLang in `folder`: the installed one with one file changed."""
    source = SglangSource.installed()
    assert source is not None
    root, found = folder / "sglang", source.root
    for part in [*module.split(".")[:-1], module.rpartition(".")[2] + ".py"]:
        root.mkdir()
        for entry in found.iterdir():
            if entry.name != part:
                (root / entry.name).symlink_to(entry)
        root, found = root / part, found / part
    text = found.read_text()
    root.write_text(change(text))
    assert root.read_text() != text
    script = folder / "script.py"
    script.write_text(f"import sglang\nsglang.__spec__.submodule_search_locations = [{str(folder / 'sglang')!r}]\n")
    return {"TEST_SABOTAGE": str(script)}


def load(model: Path, **environment: str) -> tuple[int, list[str]]:
    """Like `launch`, of a model runner that should not load `model`."""
    answer: tuple[int, list[str]] = call(_load, model, **environment)
    return answer


def _load(model: Path) -> tuple[int, list[str]]:
    return _ended(lambda: load_runner(model))
