"""SGLang's engines in processes of their own, which wait for what to time; one that ends takes no other along."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.bench import child
from scripts.bench.serving.conditions import Condition, last_error

_LINES = 2000  # of the output, in which the reason of an end is looked for


class EngineLostError(Exception):
    """An engine that has ended, hangs, or serves another pattern."""


class OutOfTimeError(Exception):
    """The time that a run may take is over."""


class Limit:
    """The time that a run may take.

    Args:
        seconds: from now on; `None` for no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self, seconds: float) -> float:
        """Return the smaller one of `seconds` and the time that is left.

        Raises:
            OutOfTimeError: if no time is left.
        """
        left = seconds if self._end is None else min(seconds, self._end - time.monotonic())
        if left <= 0:
            raise OutOfTimeError
        return left

    def over(self) -> bool:
        """Return whether no time is left."""
        return self._end is not None and time.monotonic() >= self._end


class Engine:
    """One engine; the process runs `scripts.bench.serving.prefill --child`.

    Args:
        condition: how it is started.
        options: of the command line: `model`, `engine` (JSON), `output`, and what the child reads.
        folder: for pattern files.
        place: its `port` and `nccl_port`.
        limit: of the whole run.
    """

    def __init__(
        self,
        condition: Condition,
        options: argparse.Namespace,
        folder: Path,
        place: Mapping[str, int],
        limit: Limit | None = None,
    ) -> None:
        self.condition, self._limit = condition, limit or Limit()
        common = {**place, **json.loads(options.engine)}
        self._output: queue.Queue[str | None] = queue.Queue()
        self._last: list[str] = []
        self._log = options.output.with_suffix(f".{condition.name}.log").open("w", buffering=1)
        command = [sys.executable, "-m", "scripts.bench.serving.prefill", "--child", condition.name]
        command += ["--model", str(options.model), "--engine", json.dumps(condition.engine(common, options.model))]
        for name in ("greedy", "vocabulary"):
            command += ["--" + name, str(getattr(options, name))] if name in options else []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=condition.environment(options.model, folder),
            start_new_session=True,  # it ends with its standard input, or by `end`
        )
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self, seconds: float = 900) -> dict[str, Any]:
        """Wait until the engine is up, and return what it says.

        Raises:
            EngineLostError: if it is not, or has not proven the requested pattern.
            OutOfTimeError: if the limit is reached before.
        """
        answer = self.ask(seconds)
        if answer.get("serves") != self.condition.proven:
            raise self._lost(f"serves {answer.get('serves')}, expected {self.condition.proven}")
        return answer

    def ask(self, seconds: float = 900, **what: Any) -> dict[str, Any]:
        """Have something timed, and return it; without anything wait for what the engine says first.

        What could not be timed by an engine that lives on is in `error`.

        Raises:
            EngineLostError: if it ends, or gives no answer within `seconds`.
            OutOfTimeError: if the limit is reached before.
        """
        assert self._process.stdin is not None
        if what:
            try:
                self._process.stdin.write(json.dumps(what) + "\n")
                self._process.stdin.flush()
            except OSError:
                pass  # it has ended, which its output says, too
        end = time.monotonic() + self._limit.left(seconds)
        while True:
            try:
                line = self._output.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                self._limit.left(seconds)
                raise self._lost(f"no answer within {seconds:.0f} s: {last_error(''.join(self._last))}") from None
            if line is None:
                raise self._lost(last_error("".join(self._last)))
            if line.startswith(child.RESULT):
                found: dict[str, Any] = json.loads(line.removeprefix(child.RESULT))
                return found

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last = [*self._last[-_LINES:], line]
            with suppress(ValueError):  # the log is closed
                self._log.write(line)
            if line.startswith(child.RESULT):
                self._output.put(line)
        self._output.put(None)

    def _lost(self, reason: str) -> EngineLostError:
        self.end()
        return EngineLostError(reason)

    def end(self) -> None:
        """End the process, and those that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
