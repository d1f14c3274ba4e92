"""Conversations as a tokenizer's chat template writes them, with the spans that the assistant wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from indexcache_search.data.shapes import Conversation, Text, Written
from indexcache_search.data.templates import Turns, render
from indexcache_search.errors import DataError, RowError
from sglang_indexcache.io.errors import one_line

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat(Conversation):
    """A conversation for the tokenizer's chat template.

    Attributes:
        messages: each has `role` and a string `content`; arguments of an assistant's tool calls are objects.
        tools: functions the assistant may call, in OpenAI's form.
        plain: text to use where the tokenizer has no template; `None` if there is none.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    plain: Text | None = None

    def written(self, tokenizer: Any, turns: Turns, replies: bool) -> Written:
        """See `Conversation.written`."""
        source = getattr(tokenizer, "chat_template", None)
        if source:
            texts, apart = ChatTemplate(tokenizer, turns, replies).write(self)
            whole = "".join(text.text for text in texts)
            return Written(texts, apart=apart, left_out=[*self._unknown_to(str(source)), *self._missing_in(whole)])
        if self.plain is None:
            raise DataError(
                "a conversation, and the tokenizer has no chat template; expected --rows chat_template=FILE with"
                " one in Jinja, or rows of text or input_ids (docs/reference/data.md)"
            )
        return Written([self.plain], by_template=False)

    def _unknown_to(self, template: str) -> Iterator[str]:
        """Yield what the conversation has, of which a template has no word."""
        for what, given, names in (
            ("tools", self.tools, ("tools",)),
            ("reasoning", any(item.get("reasoning_content") for item in self.messages), ("reasoning", "thinking")),
        ):
            if given and not any(name in template for name in names):
                yield what

    def _missing_in(self, text: str) -> list[str]:
        """Return the roles other than user and assistant whose messages before the last reply are not in a text."""
        replies = [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]
        found: dict[str, None] = {}
        for message in self.messages[: replies[-1]] if replies else ():
            word = max(re.findall(r"\w+", message["content"]), key=len, default="")
            if message["role"] not in ("user", "assistant") and word not in text:
                found[f"messages of role {message['role']}"] = None
        return list(found)


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


def _with_strings(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON strings."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message
