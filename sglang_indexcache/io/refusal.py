"""Refusals, which end the process rather than serve something else, and the variables that switch the plugin on.

This module imports nothing of the project, so that whatever is broken there can still be refused.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

PATTERN_VARIABLE = "SGLANG_INDEXCACHE_PATTERN"
ALLOW_MISMATCH_VARIABLE = "SGLANG_INDEXCACHE_ALLOW_CONFIG_MISMATCH"
SHARD_VARIABLE = "SGLANG_INDEXCACHE_SHARD_INDEXERS"
SHARD_FLAG = "--indexcache-shard-indexers"
UNION_VARIABLE = "SGLANG_INDEXCACHE_UNION_ATTENTION"
UNION_FLAG = "--indexcache-union-attention"
GROUPING_VARIABLE = "SGLANG_INDEXCACHE_NO_GROUPING"
GROUPING_FLAG = "--indexcache-no-grouping"
UNREAD_VARIABLE = "SGLANG_INDEXCACHE_ALLOW_UNREAD_SOURCE"
UNREAD_FLAG = "--indexcache-allow-unread-source"
CALIBRATE_VARIABLE = "SGLANG_INDEXCACHE_CALIBRATE"
ADMIN_KEY_VARIABLE = "SGLANG_INDEXCACHE_ADMIN_API_KEY"  # for calibration; a flag would show in the process list
LEFT_VARIABLE = "SGLANG_INDEXCACHE_REFUSALS"  # set by a process that launches others: a file for their refusals
EXIT_CODE = 2


def refuse(reason: str, cause: BaseException | None = None, at_once: bool = False) -> NoReturn:
    """End this process with one line, after the traceback of `cause` if there is one.

    SGLang's plugin loader and hook registry log every `Exception` and go on; they let `SystemExit` through. In another
    thread than the main one, `SystemExit` would end only the thread, so there the process ends at once. With `at_once`
    it does so anywhere: the interpreter's own end could wait for a process that does not come.
    """
    if cause is not None:
        traceback.print_exception(cause, file=sys.stderr)
    sys.stderr.write(f"indexcache: {reason}\n")
    sys.stderr.flush()
    if os.environ.get(LEFT_VARIABLE):
        with suppress(OSError), open(os.environ[LEFT_VARIABLE], "a") as left:
            left.write(f"{reason}\n")
    if threading.current_thread() is threading.main_thread() and not at_once:
        raise SystemExit(EXIT_CODE)
    os._exit(EXIT_CODE)


def refuse_unforeseen(doing: str, cause: BaseException) -> NoReturn:
    """End this process for an unforeseen error."""
    line = " ".join(str(cause).split())[:200]
    refuse(f"{doing}: {type(cause).__name__}{': ' if line else ''}{line}; see the traceback above", cause)
