"""SGLang plugin (entry point group `sglang.srt.plugins`): serve the requested pattern, or refuse.

`SGLANG_INDEXCACHE_PATTERN` names a pattern; `SGLANG_INDEXCACHE_CALIBRATE=1` makes a server for a search instead. Both
are read when an engine is launched (`requested`): SGLang loads plugins once in a process, which may launch several
engines. The plugin observes a few functions of SGLang. It registers the hooks that serve an engine when that engine has
a request, and does nothing for the others. This module imports nothing of the project but `requested` and `refusal`,
and what these do, so that an import that fails is refused, not logged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sglang_indexcache.io.refusal import refuse, refuse_unforeseen
from sglang_indexcache.sglang.asked import environment_asks
from sglang_indexcache.sglang.requested import is_decided, refuse_unasked, request_again, request_of

LAUNCH = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
CONFIGURE = "sglang.srt.configs.model_config.ModelConfig.from_server_args"
SCHEDULE = "sglang.srt.managers.scheduler.Scheduler.__init__"
START = "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes"  # for a launch that loads the plugins itself
OBSERVED = (LAUNCH, CONFIGURE, SCHEDULE, START)


def register() -> None:
    """Look out for engines with a request; SGLang calls this entry point."""
    try:
        if environment_asks():
            from sglang_indexcache import serving

            serving.require()  # an SGLang without the observed functions would serve without the pattern
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        for target in OBSERVED:
            HookRegistry.register(target, observe(target), HookType.AROUND)
    except Exception as error:
        _end("the plugin could not be registered", error)


def observe(target: str) -> Callable[..., Any]:
    """Return a hook around `target` that hands over to `serving` if the engine has a request."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            follow = _follower(target, original, args, kwargs)
        except Exception as error:
            _end("what the engine is asked for can't be served", error)
        if follow is not None:
            return follow(original, *args, **kwargs)
        result = original(*args, **kwargs)
        if target == LAUNCH:
            refuse_unasked(result)
        return result

    return around


def _follower(target: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Callable[..., Any] | None:
    try:
        server_args = inspect.signature(original).bind(*args, **kwargs).arguments["server_args"]
    except (TypeError, KeyError):
        if environment_asks():
            refuse(f"this SGLang calls {target} without server_args, so it can't be told the pattern")
        return None
    if target == START and is_decided(server_args):
        return None
    if target == SCHEDULE and not is_decided(server_args) and request_of(server_args) is not None:
        refuse(
            "the process that launched this engine had not loaded the plugin, so it would not wait for a proof;"
            " expected sglang.srt.plugins.load_plugins() before threads launch engines, and server arguments as sent"
        )
    request = request_again(server_args) if target == LAUNCH else request_of(server_args)
    if request is None:
        return None
    if request.asked.calibrate:
        from sglang_indexcache import calibration

        calibration.offer()
    from sglang_indexcache import serving

    return serving.follower(target)


def _end(doing: str, error: Exception) -> None:
    if type(error).__module__.partition(".")[0] == "sglang_indexcache":
        refuse(str(error))
    refuse_unforeseen(doing, error)
