"""SGLang's HTTP servers of conditions, side by side, and what they end with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from scripts.bench.serving.conditions import Condition, flags, last_error
from scripts.bench.serving.engines import EngineLostError, Limit
from sglang_indexcache.sglang.requested import KEY

ASKED_SECONDS = 30


@dataclass
class Server:
    """A server that runs; `process` and `log` are `None` if somebody else has started it."""

    name: str
    url: str
    proven: str | None = None
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(
        cls, condition: Condition, common: Mapping[str, Any], model: Path, place: Mapping[str, int], log: Path
    ) -> Server:
        """Start a server; its pattern file lies beside the log.

        Args:
            condition: how it is started.
            common: arguments of `sglang.Engine` for all.
            model: folder with config.json.
            place: its `port` and `nccl_port`.
            log: file for its output.
        """
        arguments = condition.engine({**place, **common}, model)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags(arguments)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=condition.environment(model, log.parent),
                start_new_session=True,
            )
        return cls(condition.name, f"http://127.0.0.1:{arguments['port']}", condition.proven, process, log)

    def wait(self, seconds: float, limit: Limit) -> None:
        """Wait until it answers.

        Raises:
            EngineLostError: if it ends, takes longer, or has not proven its pattern.
            OutOfTimeError: if the limit is reached before.
        """
        end = time.monotonic() + limit.left(seconds)
        while not self._answers("/health_generate"):
            if not self._running() or time.monotonic() > end:
                limit.left(seconds)
                raise EngineLostError(self.why())
            time.sleep(0.5)
        states = json.loads(self._get("/server_info")).get("internal_states") or [{}]
        self.state = states[0].get(KEY) or {}
        found = self.state.get("pattern") if self.state.get("proven") else None
        if self.process is not None and found != self.proven:
            raise EngineLostError(f"serves {found}, expected {self.proven}")

    def alive(self) -> bool:
        """Return whether it still answers."""
        return self._running() and self._answers("/health")

    def why(self) -> str:
        """Return the line of its log that says best why it ended."""
        return "no answer" if self.log is None else last_error(self.log.read_text(errors="replace"))

    def end(self) -> None:
        """End it and its processes, if this process has started it."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _running(self) -> bool:
        return self.process is None or self.process.poll() is None

    def _answers(self, path: str) -> bool:
        try:
            self._get(path)
        except (OSError, HTTPException):
            return False
        return True

    def _get(self, path: str) -> bytes:
        with urlopen(self.url + path, timeout=ASKED_SECONDS) as answer:  # noqa: S310
            content: bytes = answer.read()
        return content
