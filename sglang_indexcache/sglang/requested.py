"""The request of an engine for a pattern or for calibration: decided at its launch, carried by its server arguments.

A process may launch several engines, and its environment may change between them. So the environment is read once for
each engine. SGLang hands the server arguments to all processes of the engine, and the decision with them. This module
imports nothing that could be missing, since it also runs for engines without a request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from sglang_indexcache.io.refusal import CALIBRATE_VARIABLE, refuse
from sglang_indexcache.sglang.asked import Asked, environment_asks

CALIBRATION_KEY = "indexcache_calibration"  # in /server_info of a calibration server
KEY = "indexcache"  # in SGLang's model overrides, in /server_info and in what a scheduler says when it is ready
ATTRIBUTE = "_indexcache"  # SGLang seals and shows the fields of its server arguments; others are pickled along
_UNDECIDED = object()
_MEMOS = ("_model_config", "model_config")  # SGLang makes them of server arguments, with the pattern in them


@dataclass(frozen=True, kw_only=True)
class CarriedPattern:
    """A pattern that the process of the launch has read and checked, for the others.

    Attributes:
        source: the file and retention, or the letters; of a file on the hub, with its commit.
        key: `Pattern.key` of it.
    """

    source: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """The request of one engine; two are equal if they ask for the same.

    Attributes:
        asked: what the environment of the launch asks for.
        own: the section of the engine's own model overrides, as it was parsed; `None` without one.
        engine: name of the engine, which no other has.
        carried: the pattern that was read; `None` before, and where it is the model's own.
        proofs: folder in which schedulers leave their proofs; `None` before the launch.
        launched: whether an engine was launched with it.
    """

    asked: Asked
    own: Any = None
    engine: str = field(default_factory=lambda: uuid4().hex, compare=False)
    carried: CarriedPattern | None = field(default=None, compare=False)
    proofs: str | None = field(default=None, compare=False)
    launched: bool = field(default=False, compare=False)


def is_decided(server_args: Any) -> bool:
    """Return whether the request of the engine with these server arguments is decided."""
    return getattr(server_args, ATTRIBUTE, _UNDECIDED) is not _UNDECIDED


def request_of(server_args: Any) -> Request | None:
    """Return the request of the engine with these server arguments; `None` without one.

    A request that contradicts itself ends the process.
    """
    if not is_decided(server_args):
        setattr(server_args, ATTRIBUTE, _decide(server_args))
    request: Request | None = getattr(server_args, ATTRIBUTE)
    return request


def amend(server_args: Any, **changes: Any) -> None:
    """Change attributes of the request that these server arguments carry; without a request do nothing."""
    request = request_of(server_args)
    if request is not None:
        setattr(server_args, ATTRIBUTE, replace(request, **changes))


def request_again(server_args: Any) -> Request | None:
    """Decide the request of an engine at its launch: server arguments of an earlier engine may be used again."""
    before = request_of(server_args) if is_decided(server_args) else _UNDECIDED
    request = _decide(server_args)
    if before != request:
        for memo in _MEMOS if before is not _UNDECIDED else ():
            getattr(server_args, "__dict__", {}).pop(memo, None)
    if before != request or (isinstance(before, Request) and before.launched):
        setattr(server_args, ATTRIBUTE, request)
    amend(server_args, launched=True)
    return request_of(server_args)


def refuse_unasked(launched: Any) -> None:
    """End the process if a scheduler of an engine without a request says that it has a pattern.

    Args:
        launched: the result of `Engine._launch_subprocesses`.
    """
    for item in launched if isinstance(launched, tuple) else ():
        for info in getattr(item, "scheduler_infos", None) or ():
            if KEY in info:
                refuse(f"a scheduler runs {info[KEY].get('pattern')}, but its engine was not asked for a pattern")


def _decide(server_args: Any) -> Request | None:
    own = _own_section(server_args)
    if own is None and not environment_asks():
        return None
    asked = Asked.of_environment()
    if asked.calibrate and own is not None:
        refuse(f"{CALIBRATE_VARIABLE} is set and the model overrides have an {KEY} section, expected one of them")
    return Request(asked=asked, own=own)


def _own_section(server_args: Any) -> Any:
    """Return the request in the engine's own model overrides; `None` without one."""
    text = getattr(server_args, "json_model_override_args", None)
    if not isinstance(text, str) or f'"{KEY}"' not in text:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None  # SGLang says so
    return content.get(KEY) if isinstance(content, dict) else None
