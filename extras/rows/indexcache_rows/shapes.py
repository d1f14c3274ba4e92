"""Shapes of rows that are conversations, questions with answers, requests of batches and of SGLang's log."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any

from indexcache_rows.chats import Chat, Message
from indexcache_rows.messages import conversation, pair, parsed
from indexcache_rows.request_log import CUT, Finished, is_cut
from indexcache_rows.responses import functions
from indexcache_search.data.shapes import Cell, Cells, Section, Shape, Text, integers, kind, one_of, string
from indexcache_search.errors import LeftOutError, RowError


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
        return Section.of(integers(*found.prompt), integers(*found.reply))
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
_TASK = f"input/context {_SYSTEM} history"
_SOLUTION = "solution/generated_solution"
SHAPES = (
    Shape("messages", "messages/conversations/conversation", _MORE, _chat, rank=10, shown="messages or conversations"),
    Shape("body (batch)", "body", "", _batch, rank=20),
    Shape("obj, out (SGLang's log)", "obj out", "event rid", _logged, rank=30),
    Shape("chosen", "chosen", f"prompt {_MORE}", _chosen, rank=40),
    Shape(
        "instruction, output", "instruction output/response", f"input/context {_SYSTEM} history", _instruction, rank=50
    ),
    Shape("context, input, answers", "context input/question answers/answer", "", _question, rank=70),
    Shape("input, outputs", "input outputs", "answer_prefix", _ruler, rank=80),
    Shape("prompt, completion", "prompt completion", _MORE, partial(_continued, name="completion"), rank=90),
    Shape(
        "problem, solution",
        f"problem {_SOLUTION}",
        _MORE,
        partial(_answer, question="problem", answer="solution"),
        rank=100,
    ),
    Shape("prompt, response", f"{_QUESTION} {_ANSWER}", _MORE, _answer, rank=110),
    Shape("question, solution", f"{_QUESTION} {_SOLUTION}", _MORE, partial(_answer, answer="solution"), rank=120),
    Shape("response of a batch", "custom_id response", "", _answers_of_a_batch, rank=130, shown=""),
)
"""Between ranks 50 and 70 is that of `text`."""
