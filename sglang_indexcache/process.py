"""The process of a command line: Ctrl-C, SIGTERM and closed streams, from the first import to the last write.

This module imports only what the interpreter has at hand, so that `begin` can come before everything else. While Python
itself starts, none of our code runs, and Python answers Ctrl-C.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

CLOSED = 141  # exit code that a shell reports of a process that SIGPIPE ended
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
PATIENCE = 5  # seconds in which running work can end by itself


class _Output(io.FileIO):
    """A stream whose writes always succeed; `failed` is the first error, which `leave` reports."""

    failed: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            written = None if self.failed else super().write(data)
            while written is None and not self.failed:  # somebody else made the other end non-blocking
                import select

                select.select([], [self], [])
                written = super().write(data)
        except OSError as error:
            self.failed = error
        return len(data) if self.failed or written is None else written


class _Process:
    """The arguments of `begin`, and what happened since."""

    command = ""
    extra = "search"
    resumes = True
    identity = -1  # id of the process that has begun; its children have others
    raising = False  # True while work is running that must end by itself
    stopped: int | None = None
    output: _Output | None = None


_this = _Process()


def run(command: str, main: Callable[[], int | None], extra: str = "", resumes: bool = False) -> NoReturn:
    """Run a command; it always ends with a result, or with one line and an exit code.

    Args:
        command: its name, for the line.
        main: imports what it needs, and returns the exit code.
        extra: name of the extra that installs what the command needs: `pip install '.[extra]'`.
        resumes: whether the same command goes on where this one ends.
    """
    begin(command, extra, resumes)
    try:
        code = main() or 0
    except BaseException as error:
        line, code = exit_line(error)
        if line:
            sys.stderr.write(f"{command}: {line}\n")
    leave(code)


def begin(command: str, extra: str = "", resumes: bool = False) -> None:
    """Answer signals with one line and an exit code, and replace streams by ones that accept every write."""
    _this.command, _this.extra, _this.resumes, _this.identity = command, extra, resumes, os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, _stop)
    sys.unraisablehook = _unraisable
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which no file of ours may have
    _this.output = _Output(1, "w", closefd=False)
    sys.stdout = _text(_this.output, sys.stdout)
    sys.stderr = _text(_Output(2, "w", closefd=False), sys.stderr, line_buffering=True)


def let_work_end() -> None:
    """Turn the first signal into a `KeyboardInterrupt`, so that open files are closed before the process ends."""
    _this.raising = True


def hand_over() -> None:
    """Restore signals and streams as they were before `begin`, for another program in this process."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is _stop:
            signal.signal(number, handler)
    sys.unraisablehook = sys.__unraisablehook__
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def exit_line(error: BaseException) -> tuple[str, int]:
    """Return the line and the exit code of a command that `error` ends; the line is empty if it was already printed."""
    if _this.stopped is not None or isinstance(error, KeyboardInterrupt):  # whatever exception the signal became
        return _signal_line(), 128 + (_this.stopped or signal.SIGINT)
    from sglang_indexcache.command_line import error_line
    from sglang_indexcache.version import requirement

    return error_line(error, requirement(_this.extra))


def leave(code: int) -> NoReturn:
    """End this process: flush what is printed, run `atexit`, and let nothing fail any more.

    If the result could not be printed, the exit code is 141 where nobody reads it, and otherwise 2 after one line. A
    `code` other than 0 wins.
    """
    _this.raising = False
    sys.stdout.flush()
    failed = None if _this.output is None else _this.output.failed
    if isinstance(failed, BrokenPipeError):
        code = code or CLOSED
    elif failed is not None:
        sys.stderr.write(f"{_this.command}: stdout: {failed.strerror}\n")
        code = code or 2
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _signal_line() -> str:
    """Say how a signal ended the command."""
    how = "interrupted" if _this.stopped in (None, signal.SIGINT) else "ended by SIGTERM"
    return how + ("; the same command goes on from here" if _this.resumes else "")


def _text(raw: _Output, before: Any, line_buffering: bool = False) -> io.TextIOWrapper:
    """Return a text stream like `before` that escapes what its encoding lacks."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=line_buffering or raw.isatty(),
    )


def _stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal."""
    first, _this.stopped = _this.stopped is None, number if _this.stopped is None else _this.stopped
    if not (first and _this.raising and os.getpid() == _this.identity):
        _end()
    import threading

    try:
        timer = threading.Timer(PATIENCE, _end)
        timer.daemon = True
        timer.start()
    except RuntimeError:  # no thread to be had
        _end()
    raise KeyboardInterrupt


def _end() -> NoReturn:
    """End this process now; a child process ends without a word."""
    if os.getpid() == _this.identity and os.environ.get("RANK", "0") == "0":
        show = "\x1b[?25h\r\x1b[K" if os.isatty(2) else ""  # a bar hides the cursor
        with _Output(2, "w", closefd=False) as stderr:
            stderr.write(f"{show}{_this.command}: {_signal_line()}\n".encode(errors="replace"))
    os._exit(128 + (_this.stopped or 0))


def _unraisable(raised: sys.UnraisableHookArgs) -> None:
    """Handle Ctrl-C where Python passes no exception on, as in a destructor: it must be neither lost nor shown."""
    if _this.stopped is not None and os.getpid() == _this.identity:
        _end()
    sys.__unraisablehook__(raised)


def die_with_parent() -> None:
    """Make Linux end this process with its parent, as SGLang does for its own processes."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
