"""Items of OpenAI's Responses API as messages: what is said, thought and called stands side by side there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from indexcache_search.errors import RowError


def as_message(item: Any, place: str) -> Mapping[str, Any] | None:
    """Return an item as a message; a message as it is; `None` for thoughts that are not readable.

    Raises:
        RowError: if it is neither.
    """
    if not isinstance(item, dict):
        raise RowError(f"{place} is {type(item).__name__}, expected an object with role and content")
    what = item.get("type")
    if "role" in item or "from" in item or not isinstance(what, str):
        return item
    if what == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "function_call", "tool_calls": [call]}
    if what == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if what == "reasoning":
        thoughts = item.get("content") or item.get("summary")
        return {"role": "reasoning", "content": thoughts} if thoughts else None
    raise RowError(f"{place} is of type {what[:40]}, expected message, function_call, function_call_output, reasoning")


def functions(tools: Any) -> Any:
    """Return the functions among tools, without those that OpenAI runs itself, such as a search of the web."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") == "function"] or None
