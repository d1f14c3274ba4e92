"""A tokenizer's chat template, and how rows are read."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from indexcache_search.errors import DataError
from sglang_indexcache.io.atomic import read_regular

RENDER_SECONDS = 1.0  # of computing; a conversation takes milliseconds
MOST_CHARACTERS = 1 << 26
_MAX_BYTES = 1 << 20
Turns = Literal["auto", "all", "each", "last"]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options for interpreting rows.

    Attributes:
        chat_template: Jinja text that replaces the tokenizer's own template.
        turns: treatment of a conversation with several replies. all: one text, where all of them count. each: one text
            per reply, up to it. last: the text up to the last reply. auto: all, or each if the template rewrites
            earlier turns once others follow, which hides the prompt that a reply saw.
        skip_bad_rows: how many bad rows of each source may be skipped.
    """

    chat_template: str | None = None
    turns: Turns = "auto"
    skip_bad_rows: int = 0


AS_THEY_ARE = RowOptions()


class _OutOfTimeError(BaseException):
    """Timeout of a template. Not an `Exception`, so that no handler inside the template catches it."""


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = (), asks: bool = False) -> str:
    """Apply the chat template of `tokenizer` to `messages`; if it `asks`, open a reply after them.

    Raises:
        DataError: if the template does not terminate, or writes too much.
        Exception: whatever the template raises.
    """
    with _limited():
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=asks
        )
    if len(text) > MOST_CHARACTERS:
        raise DataError(f"the chat template writes more than {MOST_CHARACTERS} characters, expected a conversation")
    return text


@contextmanager
def _limited() -> Iterator[None]:
    """Stop a template that computes for longer than `RENDER_SECONDS`. Works in the main thread only.

    Jinja's sandbox bounds a single loop, but not nested ones.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)
        yield
    except _OutOfTimeError:
        raise DataError(
            f"the chat template takes more than {RENDER_SECONDS:g} seconds for one conversation, expected one that"
            " comes to an end (--rows chat_template)"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def read_template(path: Path) -> str:
    """Read a chat template from a file.

    Raises:
        FileError: if it can't be read.
        DataError: if it is empty or not UTF-8.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8, expected a chat template in Jinja") from None
    if not text.strip():
        raise DataError(f"{path}: is empty, expected a chat template in Jinja")
    return text
