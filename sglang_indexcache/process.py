"""The process of a command line: Ctrl-C, SIGTERM and closed streams, from the first import to the last write.

Nothing but what the interpreter has at hand is imported here, so that `begin` can come before everything else. Earlier,
while Python itself starts, nothing of ours runs, and Ctrl-C is Python's.
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

CLOSED = 141  # what a shell reports of a process that SIGPIPE ended
PATIENCE = 5  # seconds in which what is under way can end by itself


class _Output(io.FileIO):
    """A stream whose writes always succeed; `failed` is the first error, of which `leave` tells."""

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
    """What `begin` was told, and what happened since."""

    command = ""
    extra = "search"
    resumes = True
    identity = -1  # of the process that has begun; not of its children
    raising = False  # whether something is under way that must end by itself
    stopped: int | None = None
    output: _Output | None = None


_this = _Process()


def run(command: str, main: Callable[[], int | None], extra: str = "", resumes: bool = False) -> NoReturn:
    """Run a command: whatever happens ends in a result, or in one line and an exit code.

    Args:
        command: its name, for the line.
        main: imports what it needs, and gives the exit code.
        extra: of `pip install 'sglang-indexcache[extra]'`, which has what it needs.
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
    """Answer signals with one line and an exit code from now on, and make streams that can always be written to."""
    _this.command, _this.extra, _this.resumes, _this.identity = command, extra, resumes, os.getpid()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup
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
    """From now on, the first signal is a `KeyboardInterrupt`: what is open is closed before the process ends."""
    _this.raising = True


def hand_over() -> None:
    """Leave signals and streams to another program in this process, as they were before `begin`."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is _stop:
            signal.signal(number, handler)
    sys.unraisablehook = sys.__unraisablehook__
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def exit_line(error: BaseException) -> tuple[str, int]:
    """Give the line and the exit code of a command that `error` ends; no line where something else has said it."""
    if _this.stopped is not None or isinstance(error, KeyboardInterrupt):  # whatever a signal was turned into
        return _signal_line(), 128 + (_this.stopped or signal.SIGINT)
    from sglang_indexcache.command_line import error_line

    return error_line(error, f"'sglang-indexcache[{_this.extra}]'" if _this.extra else "sglang-indexcache")


def leave(code: int) -> NoReturn:
    """End this process: what is printed is printed, `atexit` is heard, and nothing can fail any more.

    A result that could not be printed is 141 where nobody reads it, and else a line and 2; unless `code` says more.
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
    """A text stream as `before`, which escapes what its encoding lacks."""
    encoding = getattr(before, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=line_buffering or raw.isatty(),
    )


def _stop(number: int, frame: FrameType | None) -> None:
    """A signal handler."""
    first, _this.stopped = _this.stopped is None, number if _this.stopped is None else _this.stopped
    if not (first and _this.raising and os.getpid() == _this.identity):
        _end()
    import threading

    try:
        watch = threading.Timer(PATIENCE, _end)
        watch.daemon = True
        watch.start()
    except RuntimeError:  # no thread to be had
        _end()
    raise KeyboardInterrupt


def _end() -> NoReturn:
    """End this process now; a child of it without a word."""
    if os.getpid() == _this.identity and os.environ.get("RANK", "0") == "0":
        show = "\x1b[?25h\r\x1b[K" if os.isatty(2) else ""  # a bar hides the cursor
        with _Output(2, "w", closefd=False) as stderr:
            stderr.write(f"{show}{_this.command}: {_signal_line()}\n".encode(errors="replace"))
    os._exit(128 + (_this.stopped or 0))


def _unraisable(raised: sys.UnraisableHookArgs) -> None:
    """Ctrl-C where Python passes no exception on, such as a destructor: it must neither be lost nor be shown."""
    if _this.stopped is not None and os.getpid() == _this.identity:
        _end()
    sys.__unraisablehook__(raised)
