"""The request of an engine for a pattern or for calibration: decided at its launch, carried by its server arguments.

A process may launch several engines, and its environment may change between them. So the environment is read once for
each engine. SGLang hands the server arguments to all processes of the engine, and the decision with them. This module
imports nothing that could be missing, since it also runs for engines without a request.
"""

from __future__ import annotations

import json
import os
from typing import Any
from uuid import uuid4

from sglang_indexcache.io.refusal import (
    ALLOW_MISMATCH_VARIABLE,
    CALIBRATE_VARIABLE,
    GROUPING_VARIABLE,
    PATTERN_VARIABLE,
    SHARD_VARIABLE,
    UNREAD_VARIABLE,
    refuse,
)

KEY = "indexcache"  # in SGLang's model overrides, in /server_info and in what a scheduler says when it is ready
ATTRIBUTE = "_indexcache"  # SGLang seals and shows the fields of its server arguments; others are pickled along
_OFF = ("", "0")  # values of a variable that is off
_REQUESTED = ("calibrate", "spec", "own", "allow", "shard", "ungrouped", "unread")
_MEMOS = ("_model_config", "model_config")  # SGLang makes them of server arguments, with the pattern in them


def environment_asks() -> bool:
    """Return whether the environment requests anything now."""
    on = (os.environ.get(variable, "") not in _OFF for variable in (CALIBRATE_VARIABLE, SHARD_VARIABLE))
    return bool(os.environ.get(PATTERN_VARIABLE)) or any(on)


def is_decided(server_args: Any) -> bool:
    """Return whether the request of the engine with these server arguments is decided."""
    return getattr(server_args, ATTRIBUTE, None) is not None


def asked_of(server_args: Any) -> dict[str, Any]:
    """Return the request of the engine with these server arguments; empty without one.

    A request that contradicts itself ends the process.
    """
    asked: dict[str, Any] | None = getattr(server_args, ATTRIBUTE, None)
    if asked is None:
        asked = _decide(server_args)
        setattr(server_args, ATTRIBUTE, asked)
    return asked


def allows_unread(server_args: Any) -> bool:
    """Return whether the engine with these server arguments may replace methods whose source nobody has read."""
    asked: dict[str, Any] | None = getattr(server_args, ATTRIBUTE, None)
    return bool(asked and asked.get("unread"))


def ask_again(server_args: Any) -> dict[str, Any]:
    """Decide the request of an engine at its launch: server arguments of an earlier engine may be used again."""
    before: dict[str, Any] | None = getattr(server_args, ATTRIBUTE, None)
    asked = _decide(server_args)
    same = before is not None and all(before.get(name) == asked.get(name) for name in _REQUESTED)
    if before is None or not same or "launched" in before:
        setattr(server_args, ATTRIBUTE, asked)
        if before is not None and not same:
            for memo in _MEMOS:
                getattr(server_args, "__dict__", {}).pop(memo, None)
    else:
        asked = before
    if asked:
        asked["launched"] = True
    return asked


def refuse_unasked(launched: Any) -> None:
    """End the process if a scheduler of an engine without a request says that it has a pattern.

    Args:
        launched: the result of `Engine._launch_subprocesses`.
    """
    for item in launched if isinstance(launched, tuple) else ():
        for info in getattr(item, "scheduler_infos", None) or ():
            if KEY in info:
                refuse(f"a scheduler runs {info[KEY].get('pattern')}, but its engine was not asked for a pattern")


def _decide(server_args: Any) -> dict[str, Any]:
    spec, calibrate = os.environ.get(PATTERN_VARIABLE) or None, _is_on(CALIBRATE_VARIABLE)
    own, shard = _own_section(server_args), _is_on(SHARD_VARIABLE)
    if spec and calibrate:
        refuse(f"{PATTERN_VARIABLE} and {CALIBRATE_VARIABLE} are set, expected one of them")
    if shard and calibrate:
        refuse(f"{SHARD_VARIABLE} and {CALIBRATE_VARIABLE} are set, expected one of them")
    if calibrate and own is not None:
        refuse(f"{CALIBRATE_VARIABLE} is set and the model overrides have an {KEY} section, expected one of them")
    if not calibrate and spec is None and own is None and not shard:
        return {}
    allow = _is_on(ALLOW_MISMATCH_VARIABLE)
    return {
        "engine": uuid4().hex,
        "calibrate": calibrate,
        "spec": spec,
        "own": own,
        "allow": allow,
        "shard": shard,
        "ungrouped": _is_on(GROUPING_VARIABLE),
        "unread": _is_on(UNREAD_VARIABLE),
    }


def _is_on(variable: str) -> bool:
    """Return whether a variable is `1`; end the process if it is anything but that, `0` or empty."""
    value = os.environ.get(variable, "")
    if value not in (*_OFF, "1"):
        refuse(f"{variable} is {value!r}, expected 1 or 0")
    return value == "1"


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
