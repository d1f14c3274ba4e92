"""Ending the process rather than serving something else, and the variables that ask the plugin for something.

Imports nothing of the project, so that whatever is broken there can still be refused.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from typing import NoReturn

PATTERN_VARIABLE = "SGLANG_INDEXCACHE_PATTERN"
ALLOW_MISMATCH_VARIABLE = "SGLANG_INDEXCACHE_ALLOW_CONFIG_MISMATCH"
CALIBRATE_VARIABLE = "SGLANG_INDEXCACHE_CALIBRATE"
ADMIN_KEY_VARIABLE = "SGLANG_INDEXCACHE_ADMIN_API_KEY"  # of calibration; a flag would show in the process list
EXIT_CODE = 2


def refuse(reason: str, cause: BaseException | None = None, at_once: bool = False) -> NoReturn:
    """End this process with one line, after the traceback of `cause` if there is one.

    SGLang's plugin loader and hook registry log every `Exception` and go on; `SystemExit` is what they let through. In
    another thread than the main one that would end the thread alone, so the process ends at once there; and with
    `at_once`, where what the interpreter does at its end could wait for somebody who does not come.
    """
    if cause is not None:
        traceback.print_exception(cause, file=sys.stderr)
    sys.stderr.write(f"indexcache: {reason}\n")
    sys.stderr.flush()
    if threading.current_thread() is threading.main_thread() and not at_once:
        raise SystemExit(EXIT_CODE)
    os._exit(EXIT_CODE)


def refuse_unforeseen(doing: str, cause: BaseException) -> NoReturn:
    """End this process for an error that nobody thought of."""
    line = " ".join(str(cause).split())[:200]
    refuse(f"{doing}: {type(cause).__name__}{': ' if line else ''}{line}; see the traceback above", cause)
