"""Columns that a row may have, and their meaning. The first matching shape of the table is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.chats import Chat, Text, conversation, kind, one_of, pair, parsed, string
from indexcache_search.errors import RowError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """Piece of one document: `tokens` int, and `mask` bool of those that count, equally long."""

    tokens: NDArray[Any]
    mask: NDArray[np.bool_]


class Shape:
    """One way to write a row.

    Args:
        name: its columns, for messages.
        needs: required columns, a stroke between synonyms.
        also: optional columns, likewise.
        read: function of the columns of `needs` and `also`, by their first names.
    """

    def __init__(self, name: str, needs: str, also: str, read: Callable[[Row], Section | Text | Chat]) -> None:
        self.name, self._read = name, read
        self.needs = [names.split("/") for names in needs.split()]
        self._columns = self.needs + [names.split("/") for names in also.split()]

    def read(self, row: Row) -> Section | Text | Chat:
        """Read a row.

        Raises:
            RowError: if its columns can't be understood, or contradict each other.
        """
        if self.name != "input_ids" and row.get("loss_mask") is not None:
            raise RowError(f"loss_mask stands beside {self.name}, expected it beside input_ids")
        return self._read({names[0]: one_of(row, names, "") for names in self._columns})

    def unread(self, row: Row) -> list[str]:
        """List the columns of `row` that hold a value but are not read."""
        known = [name for names in self._columns for name in names]
        return [str(name) for name, value in row.items() if value is not None and name not in known]


def _tokens(row: Row) -> Section:
    columns = {name: _integers(values, name) for name, values in row.items() if values is not None}
    ids = columns["input_ids"]
    for name, column in columns.items():
        if len(column) != len(ids):
            raise RowError(f"{name} has {len(column)} entries, input_ids {len(ids)}; expected as many")
    every = np.ones(len(ids), np.bool_)
    mask = columns.get("loss_mask", every) != 0
    if "labels" in columns:
        counts = columns["labels"] >= 0
        if "loss_mask" in columns and (mask != counts).any():
            raise RowError("loss_mask and labels differ about what counts, expected one of them")
        mask = counts
    kept = columns.get("attention_mask", every) != 0
    return Section(ids[kept], mask[kept])


def _integers(values: Any, name: str) -> NDArray[Any]:
    with suppress(TypeError, ValueError, OverflowError):
        array = np.asarray(values)
        if array.ndim == 1 and (not len(array) or array.dtype.kind in ("iub" if name == "loss_mask" else "iu")):
            return array
    raise RowError(f"{name} is not a list of integers")


def _chat(row: Row, name: str) -> Chat:
    return conversation(row[name], name, system=row["system"], tools=row["tools"])


def _batch(row: Row) -> Chat | Text:
    """Read a request of OpenAI's batch API."""
    body = parsed(row["body"], "body", dict)
    if body.get("messages") is not None:
        return conversation(body["messages"], "body.messages", tools=body.get("tools"))
    if body.get("prompt") is not None:
        return Text.of("", string(body["prompt"], "body.prompt"))
    raise RowError(f"body has {', '.join(map(str, body)) or 'nothing'}, expected messages or prompt")


def _answers_of_a_batch(row: Row) -> Chat:
    raise RowError("holds an answer of a batch without its prompt, expected the requests' file, with body.messages")


def _chosen(row: Row) -> Chat | Text:
    """Read the preferred answer of a preference pair, with or without its prompt."""
    prompt, chosen = row["prompt"], row["chosen"]
    if isinstance(chosen, str) and (prompt is None or (isinstance(prompt, str) and chosen.startswith(prompt))):
        return Text.of(prompt or "", chosen.removeprefix(prompt or ""))
    return _continued(row, "chosen")


def _continued(row: Row, name: str) -> Chat | Text:
    """Join a prompt and its continuation `name`: strings unchanged, messages through the template."""
    prompt, end = row["prompt"], row[name]
    if isinstance(prompt, str) and isinstance(end, str):
        return Text.of(prompt, end)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _list(prompt, "prompt")
    behind = [{"role": "assistant", "content": end}] if isinstance(end, str) else _list(end, name)
    asked = any(isinstance(item, dict) and item.get("role") == "user" for item in behind)
    if behind[: len(before)] == before or (isinstance(prompt, str) and asked):  # the prompt is in it, too
        return _chat({**row, name: behind}, name)
    joined = f"prompt + {name}"
    return _chat({**row, joined: before + behind}, joined)


def _list(value: Any, name: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError(f"{name} is {kind(value)}, expected a string or a list of messages")
    return value


def _instruction(row: Row) -> Chat:
    """Read a row in the form of Alpaca or Dolly."""
    words = [string(row["instruction"], "instruction")]
    words += [string(row["input"], "input")] if row["input"] else []
    before = []
    for number, turn in enumerate(_list(row["history"], "history")):
        if not isinstance(turn, list) or len(turn) != 2:
            raise RowError(f"history[{number}] is not a list of a question and its answer")
        before.append({"role": "user", "content": string(turn[0], f"history[{number}][0]")})
        before.append({"role": "assistant", "content": string(turn[1], f"history[{number}][1]")})
    return pair("\n\n".join(words), string(row["output"], "output"), system=row["system"], before=before)


def _question(row: Row) -> Chat:
    """Read a row of LongBench: a long text, a question, and answers, of which the first is used."""
    words = [string(row[name], name) for name in ("context", "input") if row[name]]
    return pair("\n\n".join(words), _first(row["answers"], "answers"))


def _ruler(row: Row) -> Text:
    """Read a row of RULER, whose input is a whole prompt followed by the answers."""
    prompt = string(row["input"], "input")
    if row["answer_prefix"]:
        prompt += string(row["answer_prefix"], "answer_prefix")
    outputs = _list(row["outputs"], "outputs")
    answers = [string(item, f"outputs[{number}]") for number, item in enumerate(outputs)]
    return Text.of(prompt, " " + ", ".join(answers))


def _answer(row: Row) -> Chat:
    return pair(string(row["prompt"], "prompt"), _first(row["response"], "response"), system=row["system"])


def _first(value: Any, name: str) -> str:
    """Return a string, or the first string of a list."""
    if isinstance(value, list) and value:
        return string(value[0], f"{name}[0]")
    return string(value, name)


_SYSTEM, _TOOLS = "system/system_prompt", "tools/functions"
_QUESTION, _ANSWER = "prompt/question/query/input", "response/answer/answers/output"
SHAPES = (
    Shape("input_ids", "input_ids", "loss_mask labels attention_mask", _tokens),
    Shape("messages", "messages/conversations/conversation", f"{_SYSTEM} {_TOOLS}", partial(_chat, name="messages")),
    Shape("body (batch)", "body", "", _batch),
    Shape("chosen", "chosen", f"prompt {_SYSTEM} {_TOOLS}", _chosen),
    Shape("instruction, output", "instruction output/response", f"input/context {_SYSTEM} history", _instruction),
    Shape("text", "text/content", "", lambda row: Text.of("", string(row["text"], "text"))),
    Shape("context, input, answers", "context input/question answers/answer", "", _question),
    Shape("input, outputs", "input outputs", "answer_prefix", _ruler),
    Shape("prompt, completion", "prompt completion", f"{_SYSTEM} {_TOOLS}", partial(_continued, name="completion")),
    Shape("prompt, response", f"{_QUESTION} {_ANSWER}", _SYSTEM, _answer),
    Shape("response of a batch", "custom_id response", "", _answers_of_a_batch),
)
_KNOWN = "; ".join(shape.name.replace("messages", "messages or conversations") for shape in SHAPES[:-1])


def shape_of(row: Row) -> Shape:
    """Return the first shape whose required columns are set.

    Raises:
        RowError: if there is none.
    """
    for shape in SHAPES:
        if all(any(row.get(name) is not None for name in names) for names in shape.needs):
            return shape
    for shape in SHAPES:
        if all(any(name in row for name in names) for names in shape.needs):
            null = next(name for names in shape.needs for name in names if name in row and row[name] is None)
            raise RowError(f"{null} is null, expected a value")
    raise RowError(f"columns are {', '.join(map(str, row)) or 'missing'}, expected one of: {_KNOWN}")
