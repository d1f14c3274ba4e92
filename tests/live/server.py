"""SGLang's HTTP server as a user starts it, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexcache_search.engines.own_server import free_port
from scripts.tools.inprocess import ENVIRONMENT, Served, own_arguments
from sglang_indexcache.process import die_with_parent
from tests.live.forked import Forked

START_TIMEOUT, REQUEST_TIMEOUT = 600, 300
FLAGS = (
    *("--device", "cpu", "--attention-backend", "dsa", "--dsa-prefill-backend", "flashmla_sparse"),
    *("--dsa-decode-backend", "tilelang", "--dsa-topk-backend", "torch", "--dtype", "float32"),
    *("--disable-cuda-graph", "--max-total-tokens", "4096", "--max-running-requests", "8"),
    *("--mem-fraction-static", "0.3", "--random-seed", "0"),
)
LAUNCHER = (sys.executable, "-m", "sglang_indexcache.launch_server")
ROOT = Path(__file__).resolve().parents[2]
Process = subprocess.Popen[bytes] | Forked


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    log: Path

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=REQUEST_TIMEOUT) as answer:
            return str(answer.read().decode())

    def post(self, path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as answer:
            return json.load(answer)

    def generate(
        self, prompts: Sequence[Sequence[int]], names: Sequence[str], steps: int, inputs: bool = True, **more: Any
    ) -> Any:
        """`(served, cached tokens)` of each prompt; with `inputs` the logprobs of the prompt too, else only of the
        tokens that are generated (SGLang takes nothing from its prefix cache where input logprobs are asked for).
        `more` goes into the request."""
        answers = self.post(
            "/generate",
            input_ids=[list(prompt) for prompt in prompts],
            rid=list(names),
            sampling_params={"temperature": 0, "max_new_tokens": steps, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0 if inputs else -1,
            **more,
        )
        found = []
        for prompt, answer in zip(prompts, answers, strict=True):
            meta = answer["meta_info"]
            logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            if inputs:
                logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:]] + logprobs
            served = Served((*prompt, *answer["output_ids"]), len(prompt), tuple(logprobs))
            found.append((served, meta["cached_tokens"]))
        return found


def command(model: Path, *flags: str, launcher: Sequence[str] = LAUNCHER) -> list[str]:
    """The command line that starts a server for `model`."""
    own: list[str] = []
    for name, value in own_arguments(model).items():
        own += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]
    # the ranks of data-parallel attention would wait for those that sleep
    idle = () if "--enable-dp-attention" in flags else ("--sleep-on-idle",)
    return [*launcher, "--model-path", str(model), *FLAGS, *idle, *own, *flags]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **changes}


@contextmanager
def running(
    model: Path, log: Path, *flags: str, launcher: Sequence[str] = LAUNCHER, **changes: str
) -> Iterator[Server]:
    """A server that has answered /health; all its processes are ended afterwards."""
    port = free_port()
    process = start(command(model, *flags, "--port", str(port), launcher=launcher), log, **changes)
    try:
        server = Server(f"http://127.0.0.1:{port}", log)
        _wait(process, server)
        yield server
    finally:
        kill_group(process)


def start(arguments: Sequence[str], log: Path, **changes: str) -> Process:
    """Start a command that logs to `log`: forked if it is a module that Python runs."""
    log.write_text("")
    python, option, module, *rest = arguments
    if (python, option) == (sys.executable, "-m"):
        return Forked(module, rest, log, environment(**changes))
    with log.open("w") as output:
        return subprocess.Popen(
            list(arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _wait(process: Process, server: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            server.get("/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start:\n{server.log.read_text()[-4000:]}")


def kill_group(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended(arguments: Sequence[str], **changes: str) -> tuple[int, list[str]]:
    """Run a server that should end by itself; its exit code and the lines that begin with `indexcache: `."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = start(arguments, log, **changes)
        try:
            code = process.wait(START_TIMEOUT)
        finally:
            if process.poll() is None:
                kill_group(process)
        lines = [line for line in log.read_text().splitlines() if line.startswith("indexcache: ")]
    assert code is not None, lines
    return code, lines
