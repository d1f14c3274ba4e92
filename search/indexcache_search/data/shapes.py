"""Columns that a row may have, and their meaning. The first matching shape of the table is used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.chats import Cell, Chat, Message, Text, conversation, kind, one_of, pair, parsed, string
from indexcache_search.data.request_log import CUT, Finished, is_cut
from indexcache_search.data.responses import functions
from indexcache_search.errors import LeftOutError, RowError

Row = Mapping[str, Any]
Cells = Mapping[str, Cell]


@dataclass(frozen=True)
class Section:
    """Piece of one document.

    Attributes:
        tokens: int.
        mask: bool of those that count, equally long.
        written: `mask` has what a model wrote, behind a prompt that counts where prompts are not told from replies.
    """

    tokens: NDArray[Any]
    mask: NDArray[np.bool_]
    written: bool = False


class Shape:
    """One way to write a row.

    Args:
        name: its columns, for messages.
        needs: required columns, a stroke between synonyms.
        also: optional columns, likewise.
        read: function of the columns of `needs` and `also`, by their first names.
    """

    def __init__(self, name: str, needs: str, also: str, read: Callable[[Cells], Section | Text | Chat]) -> None:
        self.name, self._read = name, read
        self.needs = [names.split("/") for names in needs.split()]
        self._columns = self.needs + [names.split("/") for names in also.split()]

    def read(self, row: Row) -> Section | Text | Chat:
        """Read a row.

        Raises:
            RowError: if its columns can't be understood, or contradict each other.
        """
        if self.name != "input_ids" and row.get("loss_mask") is not None:
            raise RowError(f"loss_mask stands beside {self.named(row)}, expected it beside input_ids")
        return self._read({names[0]: one_of(row, names) for names in self._columns})

    def named(self, row: Row) -> str:
        """Return the name with the columns that `row` has, such as `question, answer` of `prompt, response`."""
        own = [next((name for name in names if row.get(name) is not None), names[0]) for names in self.needs]
        return ", ".join(own) + "".join(self.name.partition(" (")[1:])

    def unread(self, row: Row) -> list[str]:
        """List the columns of `row` that hold a value but are not read."""
        known = [name for names in self._columns for name in names]
        return [str(name) for name, value in row.items() if value is not None and name not in known]


def _tokens(row: Cells) -> Section:
    columns = {name: _integers(*cell) for name, cell in row.items() if cell.value is not None}
    ids, reply = columns["input_ids"], columns.pop("output_ids", None)
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
    if reply is None or "loss_mask" in columns or "labels" in columns:
        return Section(ids[kept], mask[kept])
    return _request(ids[kept], reply)


def _request(prompt: NDArray[Any], reply: NDArray[Any]) -> Section:
    """Join a prompt and what a server wrote behind it."""
    tokens = np.concatenate([prompt, reply])
    return Section(tokens, np.arange(len(tokens)) >= len(prompt), written=True)


def _integers(values: Any, name: str) -> NDArray[Any]:
    with suppress(TypeError, ValueError, OverflowError):
        array = np.asarray(values)
        if array.ndim == 1 and (not len(array) or array.dtype.kind in ("iub" if name == "loss_mask" else "iu")):
            return array
    raise RowError(f"{name} is not a list of integers")


def _chat(row: Cells, *parts: Cell) -> Chat:
    return conversation(*(parts or [row["messages"]]), system=row["system"], tools=row["tools"])


def _batch(row: Cells) -> Chat | Text:
    """Read a request of OpenAI's batch API."""
    body = parsed(*row["body"], dict)
    tools = Cell(body.get("tools"), "body.tools")
    if body.get("messages") is not None:
        return conversation(Cell(body["messages"], "body.messages"), tools=tools)
    if body.get("input") is not None:  # of the Responses API
        prompt, system = Cell(body["input"], "body.input"), Cell(body.get("instructions"), "body.instructions")
        return conversation(_turn(prompt, "user"), system=system, tools=Cell(functions(tools.value), tools.name))
    if body.get("prompt") is not None:
        return Text.of("", string(body["prompt"], "body.prompt"))
    raise RowError(f"body has {', '.join(map(str, body)) or 'nothing'}, expected messages, input or prompt")


def _answers_of_a_batch(row: Cells) -> Chat:
    raise RowError("holds an answer of a batch without its prompt, expected the requests' file, with body.messages")


def _logged(row: Cells) -> Section | Text:
    """Read a finished request of SGLang's log: its token ids, or its texts if it was sent as text."""
    found = Finished.of({name: parsed(*row[name], dict) for name in ("obj", "out")})
    if found is None:
        raise LeftOutError("a server sent it to itself")
    if found.unlike is not None or found.several:
        raise LeftOutError(found.unlike or "it is several requests at once")
    known = found.prompt.value is not None and found.reply.value is not None
    if found.cut if known else any(map(is_cut, found.texts)):
        raise RowError(CUT)
    if known:
        if found.short is not None:
            (ids, place), name, count = found.short
            raise RowError(f"{place} has {len(ids)} entries, but {name} is {count}: not all are there")
        return _request(_integers(*found.prompt), _integers(*found.reply))
    if all(isinstance(text, str) for text in found.texts):
        return Text.of(*found.texts)
    raise RowError("its log has no prompt or no reply, expected --log-requests-level 3")


def _chosen(row: Cells) -> Chat | Text:
    """Read the preferred answer of a preference pair, with or without its prompt."""
    row = _unpacked(row)
    prompt, chosen = row["prompt"].value, row["chosen"].value
    if isinstance(chosen, str) and (prompt is None or (isinstance(prompt, str) and chosen.startswith(prompt))):
        return Text.of(prompt or "", chosen.removeprefix(prompt or ""))
    return _continued(row, "chosen")


def _continued(row: Cells, name: str) -> Chat | Text:
    """Join a prompt and its continuation `name`: strings unchanged, messages through the template."""
    row = _unpacked(row)
    prompt, end = row["prompt"], row[name]
    if isinstance(prompt.value, str) and isinstance(end.value, str):
        return Text.of(prompt.value, end.value)
    before, behind = _turn(prompt, "user"), _turn(end, "assistant")
    asked = any(isinstance(item, dict) and item.get("role") == "user" for item in behind.value)
    if behind.value[: len(before.value)] == before.value or (isinstance(prompt.value, str) and asked):
        return _chat(row, behind)  # the prompt is in it, too
    return _chat(row, before, behind)


def _unpacked(row: Cells) -> Cells:
    """Return cells of which those that hold messages as JSON, as tables do, hold the messages."""
    return {name: Cell(_messages_of(cell.value), cell.name) for name, cell in row.items()}


def _messages_of(value: Any) -> Any:
    if isinstance(value, str) and re.match(r"\s*\[\s*\{", value):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            if isinstance(found, list) and all(
                isinstance(item, dict) and {"role", "from"} & item.keys() for item in found
            ):
                return found
    return value


def _turn(cell: Cell, role: str) -> Cell:
    """Return messages: a string is one of them, without any there are none.

    Raises:
        RowError: if it is neither.
    """
    value = cell.value
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if value is not None and not isinstance(value, list):
        raise RowError(f"{cell.name} is {kind(value)}, expected a string or a list of messages")
    return Cell(value or [], cell.name)


def _instruction(row: Cells) -> Chat:
    """Read a row in the form of Alpaca or Dolly."""
    words = [string(*row["instruction"])]
    words += [string(*row["input"])] if row["input"].value else []
    before: list[Message] = []
    history = row["history"]
    for number, turn in enumerate(_turn(history, "user").value):
        if not isinstance(turn, list) or len(turn) != 2:
            raise RowError(f"{history.name}[{number}] is not a list of a question and its answer")
        before.append({"role": "user", "content": string(turn[0], f"{history.name}[{number}][0]")})
        before.append({"role": "assistant", "content": string(turn[1], f"{history.name}[{number}][1]")})
    return pair("\n\n".join(words), string(*row["output"]), system=row["system"], before=before)


def _question(row: Cells) -> Chat:
    """Read a question about a text (LongBench, SQuAD), and its first answer."""
    words = [string(*row[name]) for name in ("context", "input") if row[name].value]
    answer = _first(row["answers"])
    if answer.value is None:
        return conversation(_turn(Cell("\n\n".join(words), row["context"].name), "user"))
    return pair("\n\n".join(words), string(*answer))


def _ruler(row: Cells) -> Text:
    """Read a row of RULER, whose input is a whole prompt followed by the answers."""
    prompt = string(*row["input"])
    if row["answer_prefix"].value:
        prompt += string(*row["answer_prefix"])
    outputs = row["outputs"]
    if not isinstance(outputs.value, list):
        raise RowError(f"{outputs.name} is {kind(outputs.value)}, expected a list of strings")
    answers = [string(item, f"{outputs.name}[{number}]") for number, item in enumerate(outputs.value)]
    return Text.of(prompt, " " + ", ".join(answers))


def _answer(row: Cells, question: str = "prompt", answer: str = "response") -> Chat:
    """Read a question and its answer: strings, or messages."""
    row = _unpacked(row)
    prompt, reply = row[question], row[answer]
    if not (isinstance(reply.value, list) and reply.value and isinstance(reply.value[0], dict) and _says(reply.value)):
        reply = _first(reply)
    if isinstance(prompt.value, str) and isinstance(reply.value, str):
        return pair(prompt.value, reply.value, system=row["system"])
    parts = [_turn(prompt, "user"), _turn(reply, "assistant")]
    return _chat(row, *(part for part in parts if part.value))


def _says(items: list[Any]) -> bool:
    """Return true for messages or items of the Responses API, and false for answers."""
    return any(isinstance(item, dict) and {"role", "from", "type"} & item.keys() for item in items)


def _first(answer: Cell) -> Cell:
    """Return an answer, or the first of several; null if there is none, as for SQuAD's unanswerable questions.

    SQuAD has them as `text` in an object, TriviaQA as `value`.
    """
    value, name = answer
    if isinstance(value, list):
        return _first(Cell(value[0], f"{name}[0]")) if value else Cell(None, name)
    if isinstance(value, dict):
        found = one_of(value, ("text", "value"), f"{name}.")
        if found.value is None:
            raise RowError(f"{name} has {', '.join(map(str, value)) or 'nothing'}, expected text or value")
        return _first(found)
    return answer


_SYSTEM = "system/system_prompt"
_MORE = f"{_SYSTEM} tools/functions"
_QUESTION, _ANSWER = "prompt/question/query/problem/input", "response/answer/answers/output"
_SOLUTION = "solution/generated_solution"
SHAPES = (
    Shape("input_ids", "input_ids", "output_ids loss_mask labels attention_mask", _tokens),
    Shape("messages", "messages/conversations/conversation", _MORE, _chat),
    Shape("body (batch)", "body", "", _batch),
    Shape("obj, out (SGLang's log)", "obj out", "event rid", _logged),
    Shape("chosen", "chosen", f"prompt {_MORE}", _chosen),
    Shape("instruction, output", "instruction output/response", f"input/context {_SYSTEM} history", _instruction),
    Shape("text", "text/content", "", lambda row: Text.of("", string(*row["text"]))),
    Shape("context, input, answers", "context input/question answers/answer", "", _question),
    Shape("input, outputs", "input outputs", "answer_prefix", _ruler),
    Shape("prompt, completion", "prompt completion", _MORE, partial(_continued, name="completion")),
    Shape("problem, solution", f"problem {_SOLUTION}", _MORE, partial(_answer, question="problem", answer="solution")),
    Shape("prompt, response", f"{_QUESTION} {_ANSWER}", _MORE, _answer),
    Shape("question, solution", f"{_QUESTION} {_SOLUTION}", _MORE, partial(_answer, answer="solution")),
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
