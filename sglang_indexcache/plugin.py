"""SGLang plugin (entry point group `sglang.srt.plugins`): serve the pattern that the environment names, or refuse.

Without `SGLANG_INDEXCACHE_PATTERN` it does nothing at all. SGLang's plugin loader and hook registry log what fails and
go on; `SystemExit` is the one thing they let through, so every refusal here is one.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

PATTERN_VARIABLE = "SGLANG_INDEXCACHE_PATTERN"
ALLOW_MISMATCH_VARIABLE = "SGLANG_INDEXCACHE_ALLOW_CONFIG_MISMATCH"


def register() -> None:
    """Entry point: register the hooks for the pattern in the environment, if there is one."""
    spec = os.environ.get(PATTERN_VARIABLE)
    if not spec:
        return
    from sglang_indexcache.errors import IndexCacheError
    from sglang_indexcache.serving import install

    try:
        install(spec, allow_config_mismatch=os.environ.get(ALLOW_MISMATCH_VARIABLE) == "1")
    except IndexCacheError as error:
        refuse(str(error))


def refuse(reason: str) -> NoReturn:
    """End this process with one line and exit code 2."""
    sys.stderr.write(f"indexcache: {reason}\n")
    sys.stderr.flush()
    raise SystemExit(2)
