"""SGLang's request log (`--log-requests`), in JSON or as text, alone or among other lines of a server's output.

The one reader of it: `finished` finds the request of a line, and `Finished` says what a request is, so that each who
reads it takes what is of use there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from indexcache_search.data.formats import LogFormat, Record
from indexcache_search.data.shapes import Cell
from indexcache_search.errors import RowError
from sglang_indexcache.io.errors import one_line

CUT = "its log is cut, expected --log-requests-level 3"
EVENT, FINISHED = "event", "request.finished"
_JSON = re.compile(r'\{"timestamp":\s*"[^"]*",\s*"event":\s*"(request\.[a-z.]+)"')
_TEXT = re.compile(r"(?:^|\] )Finish: obj=\w+\(")
_OTHER = re.compile(r"(?:^|\] )Receive(?: OpenAI)?: obj=\w*\(")
_STAMP = re.compile(r"\[[\d :,.-]+\] (?=\{)")
_CONTAINER = re.compile(r'\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d) std(out|err) [FP] |\{"log": ?"')  # CRI's, Docker's
_MEDIA = ("image_data", "video_data", "audio_data")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_VALUE = rf"{_QUOTED}|\[[\d, ]*\]|\{{(?:{_QUOTED}|[^{{}}'\"])*\}}|\w+"
_ABOUT = ("prompt_tokens", "completion_tokens", "finish_reason")
_NAMES = ("input_ids", "output_ids", "prompt_token_ids", "text", "log_metrics", "lora_path", "bootstrap_room", "rid")
_FIELDS = re.compile(
    rf"(?P<out>, out=\{{)|(?<!\w)'?(?P<name>{'|'.join((*_NAMES, *_ABOUT))})'?(?:=|: )(?P<value>{_VALUE})"
    rf"(?P<cut> \.\.\. )?|(?<!\w)(?P<more>{'|'.join((*_MEDIA, 'input_embeds'))})=(?!None|\[\])|{_QUOTED}"
)
_HALF = 1024  # characters of a text that level 2 leaves at either end


@dataclass(frozen=True)
class Finished:
    """A finished request of a log.

    Attributes:
        prompt: its token ids as they were logged, `None` if they were not.
        reply: likewise those that were written.
        texts: prompt and reply as text, likewise.
        counted: SGLang's own counts of both, where it logged them.
        name: what servers that work on one request together call it; else its own id, or `None`.
        adapter: the LoRA adapter that wrote the reply, or `None`.
        aborted: it ended before its reply did.
        hidden: neither its prompt nor its reply is there, as below level 2.
        unlike: why token ids alone are not what the model read and wrote, or `None`.
    """

    prompt: Cell
    reply: Cell
    texts: tuple[Any, Any]
    counted: tuple[Any, Any]
    name: str | None
    adapter: str | None
    aborted: bool
    hidden: bool
    unlike: str | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self | None:
        """Read `obj` and `out` of a record, and its `rid`; `None` if no client sent it, such as a health check.

        Raises:
            RowError: if they are no objects.
        """
        sent, out = (_object(record.get(name), name) for name in ("obj", "out"))
        if sent.get("log_metrics") is False:
            return None
        about = _object(out.get("meta_info") or {}, "out.meta_info")
        end = about.get("finish_reason")
        ended = end if isinstance(end, dict) else {}
        room, own = sent.get("bootstrap_room"), record.get("rid") or sent.get("rid")
        name = room if room is not None else own if isinstance(own, str) else None
        asked = sent.get("input_ids") is not None
        prompt = Cell(sent["input_ids"], "obj.input_ids") if asked else Cell(out.get("prompt_token_ids"), _OUT_PROMPT)
        return cls(
            prompt=prompt,
            reply=Cell(out.get("output_ids"), "out.output_ids"),
            texts=(sent.get("text"), out.get("text")),
            counted=(about.get("prompt_tokens"), about.get("completion_tokens")),
            name=None if name is None else one_line(name, 80),
            adapter=one_line(sent["lora_path"], 80) if sent.get("lora_path") else None,
            aborted=ended.get("type") == "abort",
            hidden="output_ids" not in out and "text" not in sent and "input_ids" not in sent,
            unlike=_unlike(sent, room is not None and ended.get("type") == "length" and ended.get("length") == 0),
        )

    @property
    def cut(self) -> bool:
        """True if level 2 left both ends of its ids alone."""
        return is_cut(self.prompt.value) or is_cut(self.reply.value)

    @property
    def several(self) -> bool:
        """True if it is a batch."""
        cells = (self.prompt.value, self.reply.value)
        return any(isinstance(ids, list) and ids and isinstance(ids[0], list) for ids in cells)

    @property
    def short(self) -> tuple[Cell, str, Any] | None:
        """Ids that are not all there, what SGLang calls their number, and it.

        So it is with `--incremental-streaming-output`, and in a session.
        """
        named = ("prompt_tokens", "completion_tokens")
        for cell, name, count in zip((self.prompt, self.reply), named, self.counted, strict=True):
            if isinstance(cell.value, list) and count is not None and count != len(cell.value):
                return cell, name, count
        return None


_OUT_PROMPT = "out.prompt_token_ids"


def _unlike(sent: Mapping[str, Any], is_half: bool) -> str | None:
    if any(sent.get(name) for name in _MEDIA):
        return "it has images, video or audio"
    if sent.get("input_embeds") is not None:
        return "its prompt is embeddings, not tokens"
    if is_half:
        return "a prefill server logged it, which writes one token: expected the decode server's log"
    return None


def is_cut(value: Any) -> bool:
    """Return true for token ids or a text of which level 2 shows both ends alone."""
    if isinstance(value, str):
        return len(value) == 2 * _HALF + 3 and value[_HALF : _HALF + 3] == "..."
    return isinstance(value, list) and "..." in value


def is_containers(line: str) -> bool:
    """Return true for a line as a container's engine stores it, which cuts long ones."""
    return _CONTAINER.match(line) is not None


def loaded(line: str) -> Any:
    """Return the JSON of a line, behind SGLang's time if that is there; `None` if it is no JSON."""
    stamp = _STAMP.match(line)
    try:
        return json.loads(line[0 if stamp is None else stamp.end() :])
    except (ValueError, RecursionError):
        return None


def finished(line: str) -> Mapping[str, Any] | RowError | None:
    """Return `obj`, `out` and `rid` of the request that a line finishes; `None` for other lines.

    It may be JSON or text, and may have other words before it.
    """
    line = _unwrapped(line)
    event, text = _JSON.search(line), _TEXT.search(line)
    if event is not None:
        if event[1] != FINISHED:
            return None
        content = loaded(line[event.start() :])
        if content is None:
            return RowError("not JSON; a line of SGLang's log that does not end")
        return {name: content[name] for name in ("obj", "out", "rid") if name in content}
    return None if text is None else _of_text(line[text.end() :])


def _unwrapped(line: str) -> str:
    """Return the line that Docker's log holds as JSON, or the line itself."""
    if line.startswith("{") and is_containers(line):
        content = loaded(line)
        return content["log"] if isinstance(content, dict) and isinstance(content.get("log"), str) else line
    return line


def _of_text(words: str) -> dict[str, Any]:
    """Read what matters of `GenerateReqInput(...), out={...}`, whose values are as Python writes them."""
    request: dict[str, Any] = {"obj": {}, "out": {"meta_info": {}}}
    own = request["obj"]
    for found in _FIELDS.finditer(words):
        if found["out"]:
            own = request["out"]
        elif found["more"]:
            own.setdefault(found["more"], True)
        elif found["name"]:
            place = own.get("meta_info", own) if found["name"] in _ABOUT else own
            value = ["..."] if found["cut"] else _literal(found["value"])
            place.setdefault(found["name"], value)
    return request


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"{name} is {type(value).__name__}, expected an object")
    return value


class SglangLog(LogFormat):
    """The requests of clients that a log finishes; other lines may stand there, and a last one be cut."""

    def is_line(self, line: str) -> bool:
        """See `LogFormat.is_line`."""
        return any(pattern.search(line) for pattern in (_JSON, _TEXT, _OTHER))

    def requests(self, lines: Iterable[str]) -> Iterator[tuple[int, Record]]:
        """See `LogFormat.requests`."""
        for number, line in enumerate(lines, 1):
            record = finished(line)
            if isinstance(record, RowError) and not line.endswith("\n"):
                continue  # still being written
            if record is not None and not _is_nobodys(record):
                yield number, record


def _is_nobodys(record: Record) -> bool:
    """Return true for a finished request that no client sent, or that was aborted."""
    try:
        request = None if isinstance(record, RowError) else Finished.of(record)
    except RowError:
        return False
    return not isinstance(record, RowError) and (request is None or request.aborted)
