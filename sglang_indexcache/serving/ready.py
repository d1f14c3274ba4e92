"""No server is ready before every scheduler has sent its proof to the process that was told the pattern.

A scheduler sends it with the word that it is ready. A data-parallel controller keeps that word to itself, so schedulers
also leave their proof in a folder that the main process makes and names in the environment.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from sglang_indexcache import probes
from sglang_indexcache.errors import ProofError
from sglang_indexcache.files import read_json_object, write_atomically
from sglang_indexcache.hooks import bound_arguments
from sglang_indexcache.overrides import parse_overrides
from sglang_indexcache.refusal import PATTERN_VARIABLE
from sglang_indexcache.serving.proof import Proven
from sglang_indexcache.serving.ranks import data_parallel_rank
from sglang_indexcache.serving.request import KEY, Request

FOLDER_VARIABLE = "SGLANG_INDEXCACHE_PROOFS"
_LIMIT = 1 << 20


def carrier(request: Request) -> Callable[..., None]:
    """Hook before `Engine._launch_subprocesses`: the pattern among the model overrides, and a folder for proofs."""

    def before(*args: Any, **kwargs: Any) -> None:
        server_args = bound_arguments(probes.LAUNCH, args, kwargs).arguments["server_args"]
        os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="indexcache-proofs-")
        overrides = carry(server_args.json_model_override_args, request)
        if overrides != server_args.json_model_override_args:
            with suppress(AttributeError):  # sealed, once SGLang has resolved them; then the variable must be there
                server_args.json_model_override_args = overrides

    return before


def carry(overrides: str, request: Request) -> str:
    """Model overrides with what `Request.from_overrides` reads; the hook on `ModelConfig` adds what the family needs.

    Raises:
        SpellingError: if they are no JSON object.
    """
    return json.dumps({**parse_overrides(overrides), KEY: request.carried()})


def reporter(request: Request, proven: Proven) -> Callable[..., None]:
    """Hook after `Scheduler.get_init_info`, the word that a scheduler is ready: it carries the proof, or is not said.

    Raises:
        ProofError: from the hook, if the model of this process was not proven.
    """

    def after(info: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        status = {**proven.proof.status(request.source), "dp_rank": data_parallel_rank(scheduler)}
        info[KEY] = status
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None and Path(folder).is_dir():
            write_atomically(Path(folder) / f"{uuid4().hex}.json", json.dumps(status))

    return after


def gate(request: Request) -> Callable[..., None]:
    """Hook after `Engine._launch_subprocesses`, which returns when all schedulers of this node are ready.

    Raises:
        ProofError: from the hook, if one of them has not proven the pattern.
    """

    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        server_args = bound_arguments(probes.LAUNCH, args, kwargs).arguments["server_args"]
        infos: list[Any] = next((item.scheduler_infos for item in result if hasattr(item, "scheduler_infos")), [])
        folder, left = os.environ.pop(FOLDER_VARIABLE, None), []
        if folder is not None:
            left = [read_json_object(path, _LIMIT) for path in sorted(Path(folder).glob("*.json"))]
            shutil.rmtree(folder, ignore_errors=True)
        replicas = int(getattr(server_args, "dp_size", 1) or 1)
        together = bool(getattr(server_args, "enable_dp_attention", False))
        check(request, [info.get(KEY) for info in infos], left, replicas, together)

    return after


def check(
    request: Request,
    sent: Iterable[Mapping[str, Any] | None],
    left: Iterable[Mapping[str, Any]],
    replicas: int,
    together: bool = False,
) -> None:
    """Check that every scheduler has proven the pattern.

    Args:
        request: what was asked for.
        sent: what each scheduler said of its proof, `None` for one that said nothing.
        left: what schedulers behind a data-parallel controller left in the folder.
        replicas: data-parallel size.
        together: whether the data-parallel ranks are one group of ranks, on several nodes even, which proves as one.

    Raises:
        ProofError: naming what is missing.
    """
    sent, left = list(sent), list(left)
    for proof in [*(item for item in sent if item is not None), *left]:
        if proof["fingerprint"] != request.pattern.fingerprint:
            raise ProofError(f"a scheduler runs {proof['pattern']}, the pattern is {request.pattern}")
    if sent and None not in sent:
        return
    missing = set() if together and left else set(range(replicas)) - {proof["dp_rank"] for proof in left}
    if missing or replicas == 1:
        raise ProofError(
            f"scheduler {min(missing, default=0)} has not proven that it runs the pattern; expected the plugin, and"
            f" {PATTERN_VARIABLE}, in the environment of every process"
        )
