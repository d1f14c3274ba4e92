"""Conversations as people store them, parsed into the one form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from indexcache_search.errors import RowError

Message = dict[str, Any]

_ROLES = {
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call", "function-call"),
    "developer": ("developer",),
    "system": ("system",),
    "tool": ("tool", "function", "observation", "function_response", "function-response"),
    "user": ("user", "human"),
}
_ROLE_OF = {word: role for role, words in _ROLES.items() for word in words}
_CALLS = ("function_call", "function-call")  # roles whose text is the call
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Text:
    """Text to tokenize.

    Attributes:
        text: all of it.
        replies: spans that a model wrote, `[start, end)` in characters.
        ended: true if no end token is to follow, since a template wrote its own.
    """

    text: str
    replies: tuple[tuple[int, int], ...]
    ended: bool = False

    @classmethod
    def of(cls, prompt: str, reply: str) -> Self:
        """Join a prompt and a model's reply unchanged."""
        return cls(prompt + reply, ((len(prompt), len(prompt) + len(reply)),))


@dataclass(frozen=True)
class Chat:
    """A conversation for the tokenizer's chat template.

    Attributes:
        messages: each has `role` and a string `content`; arguments of an assistant's tool calls are objects.
        tools: functions the assistant may call, in OpenAI's form.
        plain: text to use where the tokenizer has no template; `None` if there is none.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    plain: Text | None = None


def pair(prompt: str, reply: str, *, system: Any = None, before: Sequence[Message] = ()) -> Chat:
    """Build a chat from a question and its answer; without a template they are two paragraphs.

    Raises:
        RowError: if `system` is given but is not a string.
    """
    messages = [*before, {"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    chat = conversation(messages, "messages", system=system)
    earlier = [message["content"] for message in chat.messages[:-1]]
    return replace(chat, plain=Text.of("\n\n".join([*earlier, ""]), reply))


def conversation(value: Any, column: str, *, system: Any = None, tools: Any = None) -> Chat:
    """Read a list of messages, in OpenAI's words or ShareGPT's.

    Args:
        value: the list, or JSON of it.
        column: its name, for errors.
        system: system prompt from a column of its own.
        tools: functions from a column of their own; a list, or JSON of it.

    Raises:
        RowError: if it is not a list of messages, or contradicts itself.
    """
    listed = parsed(value, column, list)
    if not listed:
        raise RowError(f"{column} is empty, expected messages")
    messages = [_message(item, f"{column}[{number}]") for number, item in enumerate(listed)]
    if system is not None and string(system, "system"):
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif messages[0]["content"] != system:
            raise RowError(f"system and {column}[0] are two system prompts, expected one")
    functions = _tools(tools, "tools")
    for number, message in enumerate(messages):
        own = _tools(message.pop("tools", None), f"{column}[{number}].tools")
        if own and functions and own != functions:
            raise RowError(f"{column}[{number}].tools lists other functions than before, expected them once")
        functions = own or functions
    return Chat(tuple(messages), functions)


def string(value: Any, name: str) -> str:
    """Return `value` if it is a string.

    Raises:
        RowError: if not.
    """
    if not isinstance(value, str):
        raise RowError(f"{name} is {kind(value)}, expected a string")
    return value


def parsed(value: Any, name: str, expected: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """Return `value`, or the value it holds as JSON, if it has the type `expected`.

    Raises:
        RowError: if not.
    """
    what = "a list" if expected is list else "an object"
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            raise RowError(f"{name} is a string that is not JSON, expected {what}") from None
    if not isinstance(found, expected):
        raise RowError(f"{name} is {kind(found)}, expected {what}")
    return found


def kind(value: Any) -> str:
    """Return the name of a value's type, for error messages."""
    return "null" if value is None else type(value).__name__


def one_of(item: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """Return the value under whichever of several synonymous `names` is set; `None` if none is.

    Raises:
        RowError: if two of them hold different values.
    """
    found = [name for name in names if item.get(name) is not None]
    for name in found[1:]:
        if item[name] != item[found[0]]:
            raise RowError(f"{where}{found[0]} and {where}{name} differ, expected one of them")
    return item[found[0]] if found else None


def _message(item: Any, place: str) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"{place} is {kind(item)}, expected an object with role and content")
    message = {name: value for name, value in item.items() if value is not None and name not in ("from", "value")}
    word = one_of(item, ("role", "from"), f"{place}.")
    role = _ROLE_OF.get(word) if isinstance(word, str) else None
    if role is None:
        found = repr(word[:40]) if isinstance(word, str) else kind(word)
        raise RowError(f"{place}: role is {found}, expected {', '.join(_ROLES)} or human, gpt")
    content = one_of(item, ("content", "value"), f"{place}.")
    if word in _CALLS:
        calls = parsed(content, f"{place} ({word})", list if str(content).lstrip().startswith("[") else dict)
        message["tool_calls"], content = calls if isinstance(calls, list) else [calls], None
    legacy = message.pop("function_call", None)
    if legacy is not None:
        message.setdefault("tool_calls", [legacy])
    calls = _calls(message.pop("tool_calls", None), f"{place}.tool_calls")
    thoughts = one_of(item, _THOUGHTS, f"{place}.")
    if (calls or thoughts) and role != "assistant":
        raise RowError(f"{place}: {role} has {'tool_calls' if calls else 'reasoning'}, expected that of an assistant")
    if thoughts is not None:
        message["reasoning_content"] = string(thoughts, f"{place}.reasoning_content")
    if calls:
        message["tool_calls"] = calls
    if content is None and not (role == "assistant" and (calls or thoughts)):
        raise RowError(f"{place}.content is {'null' if 'content' in item or 'value' in item else 'missing'}")
    return {**message, "role": role, "content": "" if content is None else _content(content, f"{place}.content")}


def _content(value: Any, place: str) -> str:
    """Join content parts into one string, with spaces, as SGLang does for templates that take strings."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError(f"{place} is {kind(value)}, expected a string or a list of parts of type text")
    texts = []
    for number, part in enumerate(value):
        if not isinstance(part, dict):
            raise RowError(f"{place}[{number}] is {kind(part)}, expected an object of type text")
        if part.get("type") not in _TEXT_PARTS:
            raise RowError(f"{place}[{number}] is of type {str(part.get('type'))[:40]}, only text can be read")
        texts.append(string(part.get("text"), f"{place}[{number}].text"))
    return " ".join(texts)


def _calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments parsed into objects, as SGLang does."""
    calls = []
    for number, item in enumerate([] if value is None else parsed(value, place, list)):
        call = _wrapped(item, f"{place}[{number}]")
        arguments = call["function"].get("arguments")
        given = {} if arguments is None else parsed(arguments, f"{place}[{number}].function.arguments", dict)
        calls.append({**call, "function": {**call["function"], "arguments": given}})
    return calls


def _tools(value: Any, place: str) -> tuple[dict[str, Any], ...]:
    tools = [] if value is None or value == "" else parsed(value, place, list)
    return tuple(
        _wrapped(parsed(tool, f"{place}[{number}]", dict), f"{place}[{number}]") for number, tool in enumerate(tools)
    )


def _wrapped(item: Any, place: str) -> dict[str, Any]:
    """Return a tool, or a call of one, in the wrapper of OpenAI's form."""
    wrapped = item if isinstance(item, dict) and "function" in item else {"type": "function", "function": item}
    function = wrapped["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"{place} names no function, expected an object with function.name")
    return wrapped
