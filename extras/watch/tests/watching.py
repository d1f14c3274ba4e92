"""Servers and logs for tests of indexcache-watch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from indexcache_watch.cli import app
from tests.http_stub import Answering, HttpStub


def finished(tokens: list[int], reply: list[int], **more: Any) -> str:
    """A line of SGLang's log."""
    content = {"event": "request.finished", "rid": "1", "obj": {"input_ids": tokens, "text": None, **more}}
    return f"[2026-11-28 07:13:41] {json.dumps({**content, 'out': {'output_ids': reply, 'meta_info': {}}})}\n"


class Stub(HttpStub):
    """A server on which token t has the loss `loss(t)`; a prompt above `longest` is refused."""

    def __init__(self, loss: Callable[[int], float], fingerprint: str | None, longest: int = 1000) -> None:
        stub = self
        self.asked: list[dict[str, Any]] = []
        self.fingerprint, self.proven, self.loss = fingerprint, True, loss
        self.selection: dict[str, int] | None = None
        self.pattern = "FSFS"
        self.model, self.failing = "glm5", ("GET", "POST")
        self.failures: list[int | None] = []  # codes of the next answers that are none; `None` is no answer at all

        class Handler(Answering):
            def get(self) -> None:
                if self.fails("GET"):
                    return
                state: dict[str, Any] = {"fingerprint": stub.fingerprint, "proven": stub.proven}
                state |= {"selection": stub.selection, "pattern": stub.pattern}
                states = [{"indexcache": state if stub.fingerprint else None}]
                self.reply({"internal_states": states, "model_path": stub.model})

            def post(self, body: Any) -> None:
                if self.fails("POST"):
                    return
                stub.asked.append(body)
                if len(body["input_ids"]) > longest:
                    self.reply({"error": {"message": "too long"}}, 400)
                    return
                tokens = body["input_ids"][body["logprob_start_len"] :]
                logprobs = [[None, tokens[0], None], *([stub.logprob(token), token, None] for token in tokens[1:])]
                tops = [None, *([[0.0, 0, None]] for _ in tokens[1:])]
                self.reply({"meta_info": {"input_token_logprobs": logprobs, "input_top_logprobs": tops}})

            def fails(self, method: str) -> bool:
                if not stub.failures or method not in stub.failing:
                    return False
                code = stub.failures.pop(0)
                if code is not None:
                    self.reply({"error": {"message": "not now"}}, code)
                return True

        super().__init__(Handler)

    def logprob(self, token: int) -> float | None:
        """As JSON has it: null for what is not a number."""
        loss = self.loss(token)
        return -loss if math.isfinite(loss) else None


@contextmanager
def pair_of_servers() -> Iterator[tuple[Stub, Stub]]:
    """Serve a pattern that loses 0.3 on each token from 50 on, and its reference."""
    served, reference = Stub(lambda token: 1.3 if token >= 50 else 1.0, "a" * 64), Stub(lambda token: 1.0, None)
    yield served, reference
    for stub in (served, reference):
        stub.close()


def log_of_forty(folder: Path) -> Path:
    """Write forty requests that lose nothing."""
    path = folder / "log" / "host_0.log"
    path.parent.mkdir()
    path.write_text("".join(finished([number, 1, 2], [3, 4]) for number in range(40)))
    return path


def losing_requests(count: int) -> str:
    return "".join(finished([number, 1, 2], [50, 60, 70]) for number in range(count))


def watch(pair: tuple[Stub, Stub], log: Path, *more: str) -> Any:
    urls = ["--served", pair[0].url, "--reference", f"{pair[1].url}/v1"]
    output = ["--output", str(log.parent.parent / "out")]
    return CliRunner().invoke(app, [*urls, "--requests", str(log), *output, "--rate", "1000", *more])
