"""SGLang plugin (entry point `indexcache_v4_blocks`): C4 layers of DeepSeek-V4 that select in blocks, or a refusal.

`SGLANG_INDEXCACHE_V4_BLOCKS=0q4+2q16` asks for it, beside a pattern of which letters 0 and 2 are F. It is read once for
each engine, when SGLang builds the first configuration of it, and travels with its server arguments. Without it nothing
but that is done. This module imports nothing but refusals, so that an import that fails is refused, not logged.
"""

from __future__ import annotations

import os
from typing import Any

from sglang_indexcache.io.refusal import refuse, refuse_unforeseen

ENTRY = "indexcache_v4_blocks"
VARIABLE = "SGLANG_INDEXCACHE_V4_BLOCKS"
ATTRIBUTE = "_indexcache_v4_blocks"  # of server arguments, which SGLang pickles along
CONFIGURE = "sglang.srt.configs.model_config.ModelConfig.from_server_args"


def register() -> None:
    """Look out for engines that ask for it; SGLang calls this entry point."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(CONFIGURE, configuring, HookType.BEFORE)
    except Exception as error:
        if os.environ.get(VARIABLE, ""):
            refuse_unforeseen(f"the plugin {ENTRY} could not be registered", error)


def configuring(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Prepare an engine that asks for it (before `ModelConfig.from_server_args`)."""
    if not asked(server_args):
        return
    try:
        from indexcache_lab.v4_blocks import serving

        serving.prepare(server_args)
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "sglang_indexcache":
            refuse(str(error))
        refuse_unforeseen("layers can't select in blocks", error)


def asked(server_args: Any) -> str:
    """Return the blocks that the engine with these server arguments asks for; decided once, by the variable."""
    if not hasattr(server_args, ATTRIBUTE):
        setattr(server_args, ATTRIBUTE, os.environ.get(VARIABLE, "").strip())
    return str(getattr(server_args, ATTRIBUTE))
