"""How every command line of this project ends: with a result, or with one line and an exit code."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_indexcache.errors import IndexCacheError, one_line
from sglang_indexcache.files import reason
from sglang_indexcache.redaction import redacted

BAD_INPUT, UNFORESEEN = 2, 70  # 70 is EX_SOFTWARE of sysexits.h


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what was being done, should something unforeseen end the `with` block."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def ending(error: Exception) -> tuple[str, int]:
    """The line and the exit code that a command ends with.

    What a user can mend has a line of its own; the operating system's word is passed on; of anything else the traceback
    goes into a file that the line names.
    """
    if isinstance(error, IndexCacheError):
        return str(error), BAD_INPUT
    while_doing = "".join(f" while {note}" for note in getattr(error, "__notes__", [])[:1])
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return one_line(f"{where}{reason(error)}{while_doing}"), BAD_INPUT
    line = one_line(f"{type(error).__name__}: {error}", 200)
    return f"unforeseen{redacted(while_doing)}: {line} ({_saved(error)})", UNFORESEEN


def _saved(error: Exception) -> str:
    """Where the traceback is."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="indexcache-", suffix=".traceback")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(redacted("".join(traceback.format_exception(error))))
    except OSError as problem:
        return f"its traceback can't be written: {reason(problem)}"
    return f"traceback in {path}; please report it"
