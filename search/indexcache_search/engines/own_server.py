"""Calibration server that the search starts, and stops when it ends."""

from __future__ import annotations

import os
import random
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.control_requests import ServerLostError
from indexcache_search.errors import SearchError
from sglang_indexcache.checkpoint.findings import reader
from sglang_indexcache.io.redaction import KEY_VARIABLE, keep_secret, redacted
from sglang_indexcache.io.refusal import ADMIN_KEY_VARIABLE
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.process import die_with_parent

START_SECONDS = 3600  # hundreds of gigabytes from a slow disk
_PORTS = range(10000, 30000)
_OURS = "indexcache: "
_KEYS = ("--api-key", "--admin-api-key")
_LINE_BYTES = 1 << 20
_Hears = Callable[[str], None]


@contextmanager
def own_server(
    model: str, arguments: Sequence[str], log: Path, notice: _Hears = lambda _: None, warn: _Hears = lambda _: None
) -> Iterator[CalibrationServer]:
    """Start SGLang in calibration mode on a free local port; stop it at the end of the `with` block.

    Only this process can switch its patterns: the key appears in no command line and no file.

    Args:
        model: folder or hub id.
        arguments: more flags of `sglang.launch_server`, such as `--tp 8`.
        log: file for its output, without secrets.
        notice: called with a line when the server begins to load, which may take minutes.
        warn: called with the line that starts the other ones of several nodes; the search's is the first.

    Raises:
        SearchError: if SGLang is not installed, a flag is refused, or the server ends before it answers.
    """
    nodes = check_arguments(arguments)
    if find_spec("sglang") is None:
        raise SearchError("SGLang is not installed here; expected it, or --endpoint with servers that run elsewhere")
    port = free_port()
    named = ModelName.parse(model)
    started = ["-m", "sglang_indexcache.launch_server", "--indexcache-calibrate"]
    started += ["--model-path", named.repository, *(("--revision", named.revision) if named.revision else ())]
    command = [sys.executable, *started, "--host", "127.0.0.1", "--port", str(port), *arguments]
    key = secrets.token_urlsafe(32)
    keep_secret(key)  # SGLang logs its arguments, and may echo requests
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb"):
        log.chmod(0o600)
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}  # other servers'
    notice(f"a server loads {redacted(model)}; its log is {log}")
    if nodes > 1:
        line = redacted(shlex.join(["python", *started, *arguments, "--node-rank", "1"]))
        warn(f"the server waits for {nodes - 1} of {nodes} nodes; start on each, with its own --node-rank: {line}")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment, ADMIN_KEY_VARIABLE: key},
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    logging = threading.Thread(target=write_log, args=(process.stdout, log), daemon=True)
    logging.start()
    try:
        server = CalibrationServer(f"http://127.0.0.1:{port}", key=key)
        _wait(process, logging, server, log)
        yield server
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        logging.join(5)


def check_arguments(arguments: Sequence[str]) -> int:
    """Return the number of nodes; refuse flags that such a server can't have, abbreviations that SGLang accepts, too.

    Raises:
        SearchError: naming the flag, not its value.
    """
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-")
        if any(flag.startswith(name) for flag in _KEYS) and len(name) > len("--a"):
            raise SearchError(f"{name} is given, but a server of the search's own makes its own key")
        if name.startswith("--ssl"):
            raise SearchError(f"{name} is given, but a server of the search's own is asked over loopback, without TLS")
        if name == "--revision":
            raise SearchError(
                "--revision is given, which the search would not read; expected --model owner/name@REVISION"
            )
    if not arguments:
        return 1
    line = reader("a server with flags").arguments(arguments)
    if line.node_rank:
        raise SearchError(
            f"--node-rank {line.node_rank} is given; expected a search on node 0, which says what others run"
        )
    if (line.nnodes or 1) > 1 and not line.dist_init_addr:
        raise SearchError(f"--nnodes {line.nnodes} needs --dist-init-addr HOST:PORT, an address of this node")
    return line.nnodes or 1


def write_log(output: IO[bytes], log: Path) -> None:
    """Copy a server's output into `log`, line by line, without secrets."""
    with output, log.open("ab", buffering=0) as file:
        while line := output.readline(_LINE_BYTES):
            with suppress(OSError):  # a full disk must not block the server on its pipe
                file.write(redacted(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))


def free_port() -> int:
    """Return a port without a listener, for a server that binds it only after loading its model.

    It lies below the ephemeral ports of Linux and macOS (32768 and up), which any connection, even SGLang's own, could
    take before the server binds it.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise SearchError(f"No port of {_PORTS.start} to {_PORTS.stop - 1} is free here; expected one for SGLang")


def _wait(process: subprocess.Popen[bytes], logging: threading.Thread, server: CalibrationServer, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            logging.join(5)
            lines = log.read_text(errors="replace").splitlines()
            ours = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
            reason = ours[-1] if ours else (lines[-1] if lines else "no output")
            raise SearchError(f"SGLang ended with exit code {process.returncode}: {reason} (all of it: {log})")
        with suppress(ServerLostError, SearchError):
            server.status()
            return
        time.sleep(0.5)
    raise SearchError(f"SGLang gave no answer within {START_SECONDS} s; see {log}")
