"""A measurement in a process of its own, since SGLang leaves no process as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from sglang_indexcache.io.refusal import PATTERN_VARIABLE

RESULT = "RESULT "


def start(module: str, arguments: Sequence[str], pattern: str | None = None) -> subprocess.Popen[str]:
    """Start `python -m module` with the plugin serving `pattern`, or nothing."""
    environment = {key: value for key, value in os.environ.items() if key != PATTERN_VARIABLE}
    if pattern:
        environment[PATTERN_VARIABLE] = pattern
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def result_of(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Wait for the result that a process gives, and return it with all of its output.

    Raises:
        SystemExit: with that output, if there is no result.
    """
    output, _ = process.communicate()
    for line in output.splitlines():
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT)), output
    raise SystemExit(f"{output}\nno result of {process.args!r}")


def give(result: dict[str, Any]) -> NoReturn:
    """Give this process's result, and end it without the clean-up of SGLang."""
    sys.stdout.write("\n" + RESULT + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)
