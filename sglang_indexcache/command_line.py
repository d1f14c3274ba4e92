"""The end of every command line of this project: a result, or one line and an exit code."""

from __future__ import annotations

import errno
import os
import re
import resource
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_indexcache.io.atomic import reason
from sglang_indexcache.io.errors import IndexCacheError, one_line
from sglang_indexcache.io.redaction import redacted

BAD_INPUT, UNFORESEEN = 2, 70  # 70 is EX_SOFTWARE of sysexits.h
OURS = ("sglang_indexcache", "indexcache_")
_WORD = r"""(?:[^\s'"]|'[^']*'|"[^"]*")+"""  # of a shell
_WORDS = re.compile(rf"--[\w-]+ (?!-){_WORD}|{_WORD}")  # a flag stays with its value
NO_MEMORY = (
    *("not enough memory", "out of memory", "annot allocate memory", "an't allocate memory", "Unable to allocate"),
    *("std::bad_alloc", "an't start new thread", "failed to map segment", "memory allocation"),
)


@contextmanager
def error_context(work: str) -> Iterator[None]:
    """Name the work of the `with` block in the line of an unforeseen error."""
    try:
        yield
    except Exception as error:
        error.add_note(work)
        raise


def shown_command(command: str, width: int, indent: str) -> str:
    """Return a command in lines of at most `width` where its words allow that; a shell takes them as one."""
    first, *words = _WORDS.findall(command)
    lines = [indent + first]
    for word in words:
        if len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{indent}    {word}")
    return " \\\n".join(lines)


def exit_codes(one: str) -> str:
    """Return the `--help` text about exit codes; `one` is the meaning of 1."""
    return (
        f"Exit codes: 0 done, 1 {one}, 2 bad input or a machine that refuses (memory, disk, a missing package),"
        " 70 a bug of ours, 130 Ctrl-C, 141 nobody read the result, 143 SIGTERM."
    )


def error_line(error: BaseException, requirement: str) -> tuple[str, int]:
    """Return the line and the exit code that a command ends with; the line is empty if it was already printed.

    An error that a user can mend has its own line. Errors of the operating system keep its words. The traceback of any
    other error goes into a file that the line names.

    Args:
        error: ended the command.
        requirement: argument of `pip install` that installs what the command needs.
    """
    if isinstance(error, SystemExit):
        return ("", error.code or 0) if isinstance(error.code, int | None) else (one_line(error.code), BAD_INPUT)
    if isinstance(error, IndexCacheError):
        return str(error), BAD_INPUT
    if hasattr(error, "format_message"):  # a flag that typer refuses; where its classes are depends on its version
        return one_line(error.format_message()), BAD_INPUT
    context = "".join(f" while {note}" for note in getattr(error, "__notes__", [])[:1])
    if lacks_memory(error):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        allowed = "" if limit == resource.RLIM_INFINITY else f" (ulimit -v {limit // 1024})"
        return one_line(f"out of memory{context}{allowed}: {str(error) or type(error).__name__}", 300), BAD_INPUT
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith(OURS):
        missing = (error.name or str(error)).partition(".")[0]
        return f"{missing} is not installed; expected: pip install {requirement}", BAD_INPUT
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return one_line(f"{where}{reason(error)}{context}"), BAD_INPUT
    line = one_line(f"{type(error).__name__}: {error}", 200)
    return f"unforeseen{redacted(context)}: {line} ({_saved(error)})", UNFORESEEN


def lacks_memory(error: BaseException) -> bool:
    """Return whether `error` or one of its causes says, in any library's words, that memory ran out."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        seen.append(found)
        if isinstance(found, MemoryError) or getattr(found, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(found, RuntimeError | ImportError) and any(words in str(found) for words in NO_MEMORY):
            return True
        found = found.__cause__ or found.__context__
    return False


def _saved(error: BaseException) -> str:
    """Write the traceback to a file, and return a phrase that names the file."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="indexcache-", suffix=".traceback")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(redacted("".join(traceback.format_exception(error))))
    except OSError as problem:
        return f"its traceback can't be written: {reason(problem)}"
    return f"traceback in {path}; please report it"
