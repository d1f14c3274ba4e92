"""SGLang's processes as forks of one that has imported it: each imports for 20 seconds otherwise, three a server.

A server's processes are what they are elsewhere: a parent that forked nothing of its own state, children that start
from nothing but what they are sent (as with `spawn`), the environment, and the exit codes. Only the imports are shared.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import context, forkserver, process, resource_tracker, spawn
from pathlib import Path
from typing import Any

from scripts.tools.inprocess import new_thread_pool
from sglang_indexcache.process import die_with_parent

_ENVIRONMENT = "environment"


def sabotaged(spawned: bool) -> None:
    """Run the script that a test wants every process to begin with."""
    if "TEST_SABOTAGE" in os.environ:
        exec(Path(os.environ["TEST_SABOTAGE"]).read_text(), {"spawned": spawned})


class Forked:
    """A running `python -m module arguments`, with the interface of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["scripts.tools.preload"])
        self._process = server.Process(target=_run, args=(module, list(arguments), str(log), dict(environment)))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        self._process.join(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode


def _run(module: str, arguments: list[str], log: str, environment: dict[str, str]) -> None:
    os.setsid()
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process().name = "MainProcess"
    process._parent_process = None  # type: ignore[attr-defined]
    _spawn_from_a_fork()
    new_thread_pool()
    sabotaged(spawned=False)
    sys.argv = [module, *arguments]
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    with suppress(Exception):
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _spawn_from_a_fork() -> None:
    """Fork a process that has what this one has by now, and let it make all that are to be spawned later."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0indexcache-forks-{os.getpid()}")  # no file, so nothing is left behind
    listener.listen()
    address = listener.getsockname()
    alive, held = os.pipe()
    contexts: Any = context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"]
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running = resource_tracker.ensure_running
    main, preparation = os.getpid(), spawn.get_preparation_data
    spawn.prepare = _prepared_by(spawn.prepare)
    spawn.get_preparation_data = lambda name: {**preparation(name), _ENVIRONMENT: dict(os.environ)}
    if os.fork() == 0:
        die_with_parent()
        os.close(held)
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(main, signal.SIGQUIT))  # what SGLang tells a child's parent
        with suppress(SystemExit):
            forkserver.main(listener.detach(), alive, [])
        os._exit(0)
    os.close(alive)
    listener.close()
    server._forkserver_address, server._forkserver_alive_fd, server._inherited_fds = address, held, None


def _prepared_by(prepare: Any) -> Any:
    def prepared(data: dict[str, Any]) -> None:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(data.pop(_ENVIRONMENT))
        prepare(data)
        new_thread_pool()
        sabotaged(spawned=True)

    return prepared
