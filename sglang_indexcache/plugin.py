"""SGLang plugin (entry point group `sglang.srt.plugins`): serve the pattern that is asked for, or refuse.

`SGLANG_INDEXCACHE_PATTERN` names a pattern, `SGLANG_INDEXCACHE_CALIBRATE=1` makes a server for a search instead. A
scheduler that has lost the variable finds the pattern among its server arguments. With none of these the plugin does
nothing. This module imports nothing of the project, so that what can't be imported is refused, not logged.
"""

from __future__ import annotations

import os

from sglang_indexcache.refusal import (
    ALLOW_MISMATCH_VARIABLE,
    CALIBRATE_VARIABLE,
    PATTERN_VARIABLE,
    refuse,
    refuse_unforeseen,
)


def register() -> None:
    """Entry point: register the hooks for what is asked for, if anything."""
    spec, calibrate = os.environ.get(PATTERN_VARIABLE), os.environ.get(CALIBRATE_VARIABLE) == "1"
    try:
        if spec and calibrate:
            refuse(f"{PATTERN_VARIABLE} and {CALIBRATE_VARIABLE} are set, expected one of them")
        if spec:
            from sglang_indexcache import serving

            serving.install(spec, allow_config_mismatch=os.environ.get(ALLOW_MISMATCH_VARIABLE) == "1")
        elif calibrate:
            from sglang_indexcache import calibration

            calibration.install()
        else:
            _watch_for_carried_pattern()
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "sglang_indexcache":
            refuse(str(error))
        refuse_unforeseen("the plugin could not be registered", error)


def _watch_for_carried_pattern() -> None:
    """Two hooks on `Scheduler.__init__`, which look into the server arguments and do nothing else."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target, finish = "sglang.srt.managers.scheduler.Scheduler.__init__", []

    def before(scheduler: object, server_args: object, *args: object, **kwargs: object) -> None:
        text = getattr(server_args, "json_model_override_args", None)
        if isinstance(text, str) and '"indexcache"' in text:
            try:
                from sglang_indexcache import serving

                finish.append(serving.install_carried(text))
            except Exception as error:
                refuse_unforeseen("the pattern among the server arguments can't be served", error)

    def after(result: object, scheduler: object, *args: object, **kwargs: object) -> None:
        while finish:
            finish.pop()(result, scheduler)

    HookRegistry.register(target, before, HookType.BEFORE)
    HookRegistry.register(target, after, HookType.AFTER)
