"""SGLang's request log (`--log-requests`), in JSON or as text, alone or among other lines of a server's output."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from indexcache_search.errors import RowError

FLAGS = "--log-requests --log-requests-level 3"
_NAME = re.compile(r"\.log(\.[\d_-]+)?$")  # SGLang renames its log every hour
_JSON = re.compile(r'\{"timestamp":\s*"[^"]*",\s*"event":\s*"(request\.[a-z.]+)"')
_TEXT = re.compile(r"(?:^|\] )Finish: obj=\w+\(")
_OTHER = re.compile(r"(?:^|\] )Receive(?: OpenAI)?: obj=\w*\(")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_VALUE = rf"{_QUOTED}|\[[\d, ]*\]|\{{(?:{_QUOTED}|[^{{}}'\"])*\}}|\w+"
_FIELDS = re.compile(
    r"(?P<out>, out=\{)|(?<!\w)'?(?P<name>input_ids|output_ids|prompt_token_ids|text|prompt_tokens|completion_tokens"
    rf"|finish_reason|log_metrics)'?(?:=|: )(?P<value>{_VALUE})(?P<cut> \.\.\. )?|{_QUOTED}"
)
_HALF = 1024  # characters of a text that level 2 leaves at either end


def is_named(path: Path) -> bool:
    """Return true for the name of a log, also of one that was renamed."""
    return _NAME.search(path.name.lower()) is not None


def is_line(line: str) -> bool:
    """Return true for a line of a request log."""
    return any(pattern.search(line) for pattern in (_JSON, _TEXT, _OTHER))


def is_cut(value: Any) -> bool:
    """Return true for token ids or a text of which level 2 shows both ends alone."""
    if isinstance(value, str):
        return len(value) == 2 * _HALF + 3 and value[_HALF : _HALF + 3] == "..."
    return isinstance(value, list) and "..." in value


def finished(line: str) -> dict[str, Any] | RowError | None:
    """Return the finished request of a line, with `obj` and `out`; `None` if a client sent none that was answered."""
    line = _unwrapped(line)
    event, text = _JSON.search(line), _TEXT.search(line)
    if event is not None and event[1] == "request.finished":
        try:
            content = json.loads(line[event.start() :])
        except (ValueError, RecursionError):
            return RowError("not JSON; a line of SGLang's log that does not end")
        request = {name: content.get(name) for name in ("obj", "out")}
    elif text is not None and event is None:
        request = _of_text(line[text.end() :])
    else:
        return None
    sent, out = request["obj"], request["out"]
    if not isinstance(sent, dict) or not isinstance(out, dict):
        return RowError("obj or out is no object, expected a request of SGLang's log")
    reason = (out.get("meta_info") or {}).get("finish_reason")
    aborted = isinstance(reason, dict) and reason.get("type") == "abort"
    return None if sent.get("log_metrics") is False or aborted else request  # the former: health checks


def _unwrapped(line: str) -> str:
    """Return the line that a container's log holds as JSON, or the line itself."""
    if line.startswith('{"log":'):
        try:
            return str(json.loads(line)["log"])
        except (ValueError, RecursionError, KeyError):
            return line
    return line


def _of_text(words: str) -> dict[str, Any]:
    """Read what matters of `GenerateReqInput(...), out={...}`, whose values are as Python writes them."""
    request: dict[str, Any] = {"obj": {}, "out": {"meta_info": {}}}
    own = request["obj"]
    for found in _FIELDS.finditer(words):
        if found["out"]:
            own = request["out"]
        elif found["name"]:
            about = found["name"] in ("prompt_tokens", "completion_tokens", "finish_reason")
            place = own.get("meta_info", own) if about else own
            value = ["..."] if found["cut"] else _literal(found["value"])
            place.setdefault(found["name"], value)
    return request


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
