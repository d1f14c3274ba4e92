"""Conversations as people store them, parsed into the one form that chat templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from indexcache_rows.chats import Chat, Message
from indexcache_rows.responses import as_message
from indexcache_search.data.shapes import Cell, Text, kind, one_of, string
from indexcache_search.errors import RowError

_ROLES = {
    "assistant": "assistant gpt chatgpt bing bard model bot chatbot ai",
    "developer": "developer",
    "system": "system",
    "tool": "tool function observation ipython tool_response tool_result tool_results tool_output"
    " function_response function_result function_output function_call_output",
    "user": "user human prompter",
}
_CALLS = ("function_call", "function_calls", "tool_call", "tool_calls")  # words of an assistant whose text is a call
_THINKS = ("reasoning", "thinking", "thought")  # words of an assistant whose text is what it thought
_ROLE_OF = {word: role for role, words in _ROLES.items() for word in words.split()}
_ROLE_OF |= dict.fromkeys((*_CALLS, *_THINKS), "assistant")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def pair(prompt: str, reply: str, *, system: Cell | None = None, before: Sequence[Message] = ()) -> Chat:
    """Build a chat from a question and its answer; without a template they are two paragraphs.

    Raises:
        RowError: if `system` is given but is not a string.
    """
    messages = [*before, {"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    chat = conversation(Cell(messages, "messages"), system=system)
    earlier = [message["content"] for message in chat.messages[:-1]]
    return replace(chat, plain=Text.of("\n\n".join([*earlier, ""]), reply))


def conversation(*parts: Cell, system: Cell | None = None, tools: Cell | None = None) -> Chat:
    """Read lists of messages, one behind the other: in OpenAI's words, ShareGPT's, or items of the Responses API.

    Args:
        parts: the lists, or JSON of them.
        system: system prompt from a column of its own.
        tools: functions from a column of their own; a list, or JSON of it.

    Raises:
        RowError: if these are no lists of messages, or contradict themselves.
    """
    messages: list[Message] = []
    functions, thought = _tools(*tools) if tools is not None else (), False
    for part in parts:
        listed = parsed(*part, list)
        if not listed:
            raise RowError(f"{part.name} is empty, expected messages")
        for number, item in enumerate(listed):
            place = f"{part.name}[{number}]"
            found = as_message(item, place)
            if found is None:
                continue
            word, message = _message(found, place)
            own = _tools(message.pop("tools", None), f"{place}.tools")
            if own and functions and own != functions:
                raise RowError(f"{place}.tools lists other functions than before, expected them once")
            functions = own or functions
            turn = bool(messages) and messages[-1]["role"] == message["role"] == "assistant"
            if turn and (thought or word in _CALLS):
                message = _joined(messages.pop(), message)
            messages.append(message)
            thought = word in _THINKS
    if not messages:
        raise RowError(f"{parts[0].name} holds no message")
    if system is not None and system.value is not None and string(*system):
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system.value})
        elif messages[0]["content"] != system.value:
            raise RowError(f"{system.name} and {parts[0].name}[0] are two system prompts, expected one")
    return Chat(tuple(messages), functions)


def _joined(first: Message, second: Message) -> Message:
    """Join a thought or a call to what the assistant says in the same turn."""
    both = {**first, **second, "content": first["content"] + second["content"]}
    for name, empty in (("tool_calls", []), ("reasoning_content", "")):
        if name in first or name in second:
            both[name] = first.get(name, empty) + second.get(name, empty)
    return both


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


def _message(item: Mapping[str, Any], place: str) -> tuple[str, Message]:
    """Return the word for a message's author, in small letters, and the message."""
    message = {name: value for name, value in item.items() if value is not None and name not in ("from", "value")}
    author = one_of(item, ("role", "from"), f"{place}.")
    given = author.value
    word = re.sub(r"[-\s]", "_", given.strip().lower()) if isinstance(given, str) else ""
    role = _ROLE_OF.get(word)
    if role is None:
        found = repr(given[:40]) if isinstance(given, str) else kind(given)
        name = author.name.removeprefix(f"{place}.")
        raise RowError(f"{place}: {name} is {found}, expected {', '.join(_ROLES)} or human, gpt")
    content = one_of(item, ("content", "value"), f"{place}.")
    thoughts = one_of(item, _THOUGHTS, f"{place}.")
    if word in _CALLS and content.value is not None:
        calls = parsed(content.value, f"{place} ({given})", list if str(content.value).lstrip()[:1] == "[" else dict)
        message["tool_calls"], content = calls if isinstance(calls, list) else [calls], Cell(None, content.name)
    elif word in _THINKS:
        thoughts, content = Cell(_content(*content), content.name), Cell(None, content.name)
    legacy = message.pop("function_call", None)
    if legacy is not None:
        message.setdefault("tool_calls", [legacy])
    calls = _calls(message.pop("tool_calls", None), f"{place}.tool_calls")
    if (calls or thoughts.value) and role != "assistant":
        raise RowError(f"{place}: {role} has {'tool_calls' if calls else 'reasoning'}, expected that of an assistant")
    if thoughts.value is not None:
        message["reasoning_content"] = string(*thoughts)
    if calls:
        message["tool_calls"] = calls
    if content.value is None and not (role == "assistant" and (calls or thoughts.value)):
        raise RowError(f"{content.name} is {'null' if 'content' in item or 'value' in item else 'missing'}")
    return word, {**message, "role": role, "content": "" if content.value is None else _content(*content)}


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
    wrapped: dict[str, Any] = item
    if isinstance(item, dict) and "function" not in item:  # the Responses API has the type beside the name
        wrapped = {"type": "function", "function": {name: item[name] for name in item if name != "type"}}
    function = wrapped["function"] if isinstance(wrapped, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"{place} names no function, expected an object with function.name")
    return wrapped
