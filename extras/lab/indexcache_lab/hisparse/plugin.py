"""SGLang plugin (entry point `indexcache_keys`): free index keys of S layers under HiSparse, or refuse.

`SGLANG_INDEXCACHE_FREE_INDEX_KEYS=1` asks for it, beside a pattern. It is read once for each engine, when SGLang builds
the first configuration of it, and travels with its server arguments. Without it nothing but that is done. This module
imports nothing but refusals, so that an import that fails is refused, not logged.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_indexcache.io.refusal import refuse, refuse_unforeseen

ENTRY = "indexcache_keys"
VARIABLE = "SGLANG_INDEXCACHE_FREE_INDEX_KEYS"
ATTRIBUTE = "_indexcache_keys"  # of server arguments, which SGLang pickles along
CONFIGURE = "sglang.srt.configs.model_config.ModelConfig.from_server_args"


def register() -> None:
    """Look out for engines that ask for it; SGLang calls this entry point."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(CONFIGURE, configuring, HookType.BEFORE)
    except Exception as error:
        if os.environ.get(VARIABLE, "") not in ("", "0"):
            refuse_unforeseen(f"the plugin {ENTRY} could not be registered", error)


def configuring(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Prepare an engine that asks for it (before `ModelConfig.from_server_args`)."""
    if not asks(server_args):
        return
    try:
        from indexcache_lab.hisparse import pools

        pools.prepare(server_args)
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "sglang_indexcache":
            refuse(str(error))
        refuse_unforeseen("index keys can't be freed", error)


def asks(server_args: Any) -> bool:
    """Return whether the engine with these server arguments asks for it; decided once, by the variable."""
    if not hasattr(server_args, ATTRIBUTE):
        setattr(server_args, ATTRIBUTE, _is_on())
    return bool(getattr(server_args, ATTRIBUTE))


def _is_on() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        refuse(f"{VARIABLE} is {value!r}, expected 1 or 0")
    return value == "1"
