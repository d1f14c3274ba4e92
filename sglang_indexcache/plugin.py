"""SGLang plugin (entry point group `sglang.srt.plugins`): serve the pattern that the environment names, or refuse.

With `SGLANG_INDEXCACHE_CALIBRATE=1` it makes a server for a search instead; with neither it does nothing at all.
SGLang's plugin loader and hook registry log what fails and go on; `SystemExit` is the one thing they let through, so
every refusal here is one.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

PATTERN_VARIABLE = "SGLANG_INDEXCACHE_PATTERN"
ALLOW_MISMATCH_VARIABLE = "SGLANG_INDEXCACHE_ALLOW_CONFIG_MISMATCH"
CALIBRATE_VARIABLE = "SGLANG_INDEXCACHE_CALIBRATE"


def register() -> None:
    """Entry point: register the hooks for what the environment asks for, if anything."""
    spec, calibrate = os.environ.get(PATTERN_VARIABLE), os.environ.get(CALIBRATE_VARIABLE) == "1"
    if not spec and not calibrate:
        return
    from sglang_indexcache import calibration, serving
    from sglang_indexcache.errors import IndexCacheError

    try:
        if spec and calibrate:
            raise IndexCacheError(f"{PATTERN_VARIABLE} and {CALIBRATE_VARIABLE} are set, expected one of them")
        if spec:
            serving.install(spec, allow_config_mismatch=os.environ.get(ALLOW_MISMATCH_VARIABLE) == "1")
        else:
            calibration.install()
    except IndexCacheError as error:
        refuse(str(error))


def refuse(reason: str) -> NoReturn:
    """End this process with one line and exit code 2."""
    sys.stderr.write(f"indexcache: {reason}\n")
    sys.stderr.flush()
    raise SystemExit(2)
