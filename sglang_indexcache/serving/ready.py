"""The proofs of schedulers: no server is ready before the main process has one from each, and says why it ended.

A scheduler sends its proof with the message that it is ready. A data-parallel controller keeps that message to itself,
so schedulers also leave their proof in a folder. The main process makes the folder for the engine, and names it on its
server arguments. A process that is refused leaves its line there, also long after the launch: logs are read from their
end, where SGLang prints at length that a process ended.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang_indexcache.io.atomic import read_json_object, write_atomically
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.refusal import LEFT_VARIABLE, PATTERN_VARIABLE, refuse
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.preflight import EnginePlan
from sglang_indexcache.serving.ranks import data_parallel_rank
from sglang_indexcache.sglang.hooks import refusing
from sglang_indexcache.sglang.meaning import Meaning, data_parallel_ranks
from sglang_indexcache.sglang.requested import KEY, amend, request_of

_REFUSED = "refused"  # file in the folder
_LIMIT = 1 << 20
_kept: list[Path] = []  # folders of the engines that this process has launched


def report(plan: EnginePlan, info: dict[str, Any], scheduler: Any) -> None:
    """Add the proof to the message that a scheduler is ready (after `Scheduler.get_init_info`).

    Raises:
        ProofError: if the model of this process was not proven.
    """
    status = {**plan.proven.status(plan.source), "dp_rank": data_parallel_rank(scheduler)}
    info[KEY] = status
    request = request_of(scheduler.server_args)
    if request is not None and request.proofs is not None and Path(request.proofs).is_dir():
        write_atomically(Path(request.proofs, f"{uuid4().hex}.json"), json.dumps(status))


def launch(plan: EnginePlan, server_args: Any, start: Callable[[], Any]) -> Any:
    """Run `start`, which is `Engine._launch_subprocesses`, and check the proofs of this node's schedulers.

    Raises:
        ProofError: if one of them has not proven the pattern.
    """
    folder = _new_folder(server_args)
    with _last_word(folder):
        result = start()
        launched = next((item for item in result if hasattr(item, "scheduler_infos")), None)
        _check_node(plan, server_args, launched, folder)
    return result


def launch_processes(plan: EnginePlan, server_args: Any, start: Callable[[], Any]) -> Any:
    """Run `start`, which is `Engine._launch_scheduler_processes`, and check the proofs when its result waits."""
    folder = _new_folder(server_args)
    started = start()
    launched = started[0]
    wait = launched.wait_for_ready

    def wait_and_check() -> None:
        with _last_word(folder):
            wait()
            refusing(_check_node)(plan, server_args, launched, folder)

    launched.wait_for_ready = wait_and_check
    return started


def _new_folder(server_args: Any) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="indexcache-proofs-"))
    amend(server_args, proofs=str(folder))
    os.environ[LEFT_VARIABLE] = str(folder / _REFUSED)
    return folder


@contextmanager
def _last_word(folder: Path) -> Iterator[None]:
    """End with the line of a process that was refused, after what SGLang prints of that.

    The folder is removed if the block fails, else when this process ends.
    """
    try:
        yield
    except BaseException as error:
        line = _left_in(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if line is not None and isinstance(error, Exception):
            refuse(line)
        raise
    finally:
        os.environ.pop(LEFT_VARIABLE, None)
    if not _kept:
        atexit.register(_forget)
    _kept.append(folder)


def _left_in(folder: Path) -> str | None:
    with suppress(OSError):
        return (folder / _REFUSED).read_text().partition("\n")[0]
    return None


def _forget() -> None:
    while _kept:
        shutil.rmtree(_kept.pop(), ignore_errors=True)


def kill(
    original: Callable[..., Any], parent_pid: int | None, include_parent: bool = True, *more: Any, **by: Any
) -> Any:
    """End with the line of a scheduler that was refused while it served (around `kill_process_tree`)."""
    own = include_parent and parent_pid == os.getpid()
    line = next((line for line in map(_left_in, _kept if own else ()) if line is not None), None)
    if line is None:
        return original(parent_pid, include_parent, *more, **by)
    _forget()
    with suppress(Exception):
        original(parent_pid, False, *more, **by)
    sys.stderr.write(f"indexcache: {line}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _check_node(plan: EnginePlan, server_args: Any, launched: Any, folder: Path) -> None:
    left = [read_json_object(path, _LIMIT) for path in sorted(folder.glob("*.json"))]
    sent = [info.get(KEY) for info in getattr(launched, "scheduler_infos", ())]
    together = bool(Meaning(server_args).enable_dp_attention)
    check(plan.pattern, sent, left, data_parallel_ranks(server_args), together)


def check(
    pattern: Pattern,
    sent: Sequence[Mapping[str, Any] | None],
    left: Sequence[Mapping[str, Any]],
    replicas: int,
    together: bool = False,
) -> None:
    """Check that every scheduler has proven the pattern.

    Args:
        pattern: the requested pattern.
        sent: the proof that each scheduler sent, `None` for one that sent none.
        left: proofs that schedulers behind a data-parallel controller left in the folder.
        replicas: data-parallel size.
        together: whether the data-parallel ranks are one group, on several nodes even, which has one proof.

    Raises:
        ProofError: naming what is missing.
    """
    for proof in [*(item for item in sent if item is not None), *left]:
        if proof["fingerprint"] != pattern.fingerprint:
            raise ProofError(f"a scheduler runs {proof['pattern']}, the pattern is {pattern}")
    if sent and None not in sent:
        return
    missing = set() if together and left else set(range(replicas)) - {proof["dp_rank"] for proof in left}
    if missing or replicas == 1:
        raise ProofError(
            f"scheduler {min(missing, default=0)} has not proven that it runs the pattern; expected the plugin, and"
            f" {PATTERN_VARIABLE}, in the environment of every process"
        )
