"""Conversations as a tokenizer's chat template writes them, with the spans that the assistant wrote."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from indexcache_search.data.chats import Chat, Message, Text
from indexcache_search.errors import DataError, RowError
from sglang_indexcache.io.atomic import read_regular
from sglang_indexcache.io.errors import one_line

RENDER_SECONDS = 1.0  # of computing; a conversation takes milliseconds
MOST_CHARACTERS = 1 << 26
_MAX_BYTES = 1 << 20
Turns = Literal["auto", "all", "each", "last"]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options for interpreting rows.

    Attributes:
        chat_template: Jinja text that replaces the tokenizer's own template.
        turns: see `ChatTemplate`.
        skip_bad_rows: how many bad rows of each source may be skipped.
    """

    chat_template: str | None = None
    turns: Turns = "auto"
    skip_bad_rows: int = 0


AS_THEY_ARE = RowOptions()


class _OutOfTimeError(BaseException):
    """Timeout of a template. Not an `Exception`, so that no handler inside the template catches it."""


class _RewritesError(Exception):
    """Error of a template that changes a prompt or an earlier turn when later turns follow."""


class ChatTemplate:
    """Writer of conversations by a tokenizer's chat template.

    Args:
        tokenizer: the tokenizer with the template.
        turns: treatment of a conversation with several replies. all: one text, where all of them count. each: one text
            per reply, up to it. last: the text up to the last reply. auto: all, or each if the template rewrites
            earlier turns once others follow, which hides the prompt that a reply saw.
        replies: if true, find the spans that the assistant wrote.
    """

    def __init__(self, tokenizer: Any, turns: Turns, replies: bool) -> None:
        self._tokenizer, self._turns, self._replies = tokenizer, turns, replies

    def write(self, chat: Chat) -> tuple[list[Text], bool]:
        """Return the texts of one conversation, and true if `auto` split it.

        Raises:
            RowError: if the template refuses it, or replies can't be separated from prompts.
            DataError: if the template does not terminate.
        """
        found = [
            number
            for number, message in enumerate(chat.messages)
            if number and message["role"] == "assistant" and message.get("weight") != 0  # OpenAI's: not learned from
        ]
        if self._turns in ("auto", "all") or not found:
            with suppress(_RewritesError):
                return [self._whole(chat, found)], False
        if self._turns == "all":
            raise RowError(
                "the chat template writes earlier turns otherwise once others follow, so replies can't be told from"
                " prompts; expected --rows turns=each or last, or input_ids with a loss_mask"
            )
        chosen = found[-1:] if self._turns == "last" else found
        try:
            return [self._upto(chat, number) for number in chosen], self._turns == "auto"
        except _RewritesError:
            raise RowError(
                "the chat template writes a prompt otherwise once its reply follows, so replies can't be told from"
                " prompts; expected another --rows chat_template, or input_ids with a loss_mask"
            ) from None

    def _whole(self, chat: Chat, found: Sequence[int]) -> Text:
        """Write one text, in which every reply follows its own prompt."""
        text = self._render(chat, chat.messages)
        spans: list[tuple[int, int]] = []
        for number in found if self._replies else ():
            reply = self._upto(chat, number)
            if not text.startswith(reply.text):
                raise _RewritesError
            spans += reply.replies
        return Text(text, tuple(spans), ended=True)

    def _upto(self, chat: Chat, number: int) -> Text:
        """Write the conversation up to reply `number`, of which only that reply counts.

        A prompt may end with text that the answer lacks, such as `<think>` where the data has no thoughts.
        """
        text = self._render(chat, chat.messages[: number + 1])
        if not self._replies:
            return Text(text, (), ended=True)
        prompt = self._render(chat, chat.messages[:number], asks=True)
        if not text.startswith(prompt) and not text.startswith(self._render(chat, chat.messages[:number])):
            raise _RewritesError
        pairs = enumerate(zip(prompt, text, strict=False))
        start = next((at for at, (asked, written) in pairs if asked != written), min(len(prompt), len(text)))
        return Text(text, ((start, len(text)),), ended=True)

    def _render(self, chat: Chat, messages: Sequence[Message], asks: bool = False) -> str:
        """Render `messages`; if the template refuses them, try the other forms that templates know.

        The first form is OpenAI's, as in SGLang: wrapped tools, and arguments as objects. The second has tools without
        the wrapper, as in SGLang. The third has arguments as strings, which the templates of DeepSeek-V3.1 take.
        """
        forms: list[tuple[Sequence[Message], Sequence[Any]]] = [(messages, chat.tools)]
        if chat.tools:
            forms.append((messages, [tool["function"] for tool in chat.tools]))
        if any("tool_calls" in message for message in messages):
            forms.append((list(map(_with_strings, messages)), chat.tools))
        first: Exception | None = None
        for form, tools in forms:
            try:
                return render(self._tokenizer, form, tools, asks)
            except DataError:
                raise
            except Exception as error:  # templates may raise anything
                first = first or error
        raise RowError(f"the chat template refuses it: {one_line(first, 200) or type(first).__name__}")


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] = (), asks: bool = False) -> str:
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


def _with_strings(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON strings."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


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
