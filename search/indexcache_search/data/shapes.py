"""Columns that a row may have, and their meaning. The first matching shape of the table is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from indexcache_search.data.chats import Chat, Text, conversation, kind, one_of, pair, parsed, string
from indexcache_search.errors import RowError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Token ids and a mask of those that count, not yet checked."""

    ids: Any
    mask: Any | None = None


@dataclass(frozen=True)
class Shape:
    """One way to write a row.

    Attributes:
        name: its columns, for messages.
        needs: required columns, each with its synonyms.
        also: optional columns, each with its synonyms.
        read: function of the columns of `needs` and `also`, by their first names.
    """

    name: str
    needs: tuple[tuple[str, ...], ...]
    also: tuple[tuple[str, ...], ...]
    read: Callable[[Row], Tokens | Text | Chat]

    @property
    def columns(self) -> tuple[str, ...]:
        """All column names that it knows."""
        return tuple(name for names in (*self.needs, *self.also) for name in names)


def _tokens(row: Row) -> Tokens:
    ids, mask, labels, attended = (row[name] for name in ("input_ids", "loss_mask", "labels", "attention_mask"))
    for name, other in (("labels", labels), ("attention_mask", attended)):
        if other is not None and not (_as_long(ids, other) and all(type(item) is int for item in other)):
            raise RowError(f"{name} is not a list of integers as long as input_ids")
    if labels is not None:
        counts = [int(label >= 0) for label in labels]
        if mask is not None and mask != counts:
            raise RowError("loss_mask and labels differ about what counts, expected one of them")
        mask = counts
    if attended is None:
        return Tokens(ids, mask)
    if mask is not None and not _as_long(ids, mask):
        raise RowError("loss_mask is not a list as long as input_ids")
    kept = [number for number, item in enumerate(attended) if item]
    return Tokens([ids[at] for at in kept], None if mask is None else [mask[at] for at in kept])


def _as_long(ids: Any, other: Any) -> bool:
    return isinstance(ids, list) and isinstance(other, list) and len(ids) == len(other)


def _messages(row: Row) -> Chat:
    return conversation(row["messages"], "messages", system=row["system"], tools=row["tools"])


def _batch(row: Row) -> Chat | Text:
    """Read a request of OpenAI's batch API."""
    body = parsed(row["body"], "body", dict)
    if body.get("messages") is not None:
        return conversation(body["messages"], "body.messages", tools=body.get("tools"))
    if body.get("prompt") is not None:
        return Text(((string(body["prompt"], "body.prompt"), True),))
    raise RowError(f"body has {', '.join(map(str, body)) or 'nothing'}, expected messages or prompt")


def _answers_of_a_batch(row: Row) -> Chat:
    raise RowError("holds an answer of a batch without its prompt, expected the requests' file, with body.messages")


def _chosen(row: Row) -> Chat | Text:
    """Read the preferred answer of a preference pair, with or without its prompt."""
    prompt, chosen = row["prompt"], row["chosen"]
    if isinstance(chosen, str):
        if prompt is None:
            return Text(((chosen, True),))
        if isinstance(prompt, str) and prompt and chosen.startswith(prompt):
            return Text(((prompt, False), (chosen[len(prompt) :], True)))
    return _continued(row, chosen, "chosen")


def _completion(row: Row) -> Chat | Text:
    return _continued(row, row["completion"], "completion")


def _continued(row: Row, end: Any, name: str) -> Chat | Text:
    """Join a prompt and its continuation: strings unchanged, messages through the template."""
    prompt = row["prompt"]
    if isinstance(prompt, str) and isinstance(end, str):
        return Text(((prompt, False), (end, True)))
    before: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _list(prompt, "prompt")
    behind: list[Any] = [{"role": "assistant", "content": end}] if isinstance(end, str) else _list(end, name)
    asked = any(isinstance(item, dict) and item.get("role") == "user" for item in behind)
    whole = behind[: len(before)] == before or (isinstance(prompt, str) and asked)  # the prompt is in it, too
    column = name if whole else f"prompt + {name}"
    return conversation(behind if whole else before + behind, column, system=row["system"], tools=row["tools"])


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


def _text(row: Row) -> Text:
    return Text(((string(row["text"], "text"), True),))


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
    return Text(((prompt, False), (" " + ", ".join(answers), True)))


def _answer(row: Row) -> Chat:
    return pair(string(row["prompt"], "prompt"), _first(row["response"], "response"), system=row["system"])


def _first(value: Any, name: str) -> str:
    """Return a string, or the first string of a list."""
    if isinstance(value, list) and value:
        return string(value[0], f"{name}[0]")
    return string(value, name)


_SYSTEM = ("system", "system_prompt")
_TOOLS = ("tools", "functions")
SHAPES = (
    Shape("input_ids", (("input_ids",),), (("loss_mask",), ("labels",), ("attention_mask",)), _tokens),
    Shape("messages", (("messages", "conversations", "conversation"),), (_SYSTEM, _TOOLS), _messages),
    Shape("body (batch)", (("body",),), (), _batch),
    Shape("chosen", (("chosen",),), (("prompt",), _SYSTEM, _TOOLS), _chosen),
    Shape(
        "instruction, output",
        (("instruction",), ("output", "response")),
        (("input", "context"), _SYSTEM, ("history",)),
        _instruction,
    ),
    Shape("text", (("text", "content"),), (), _text),
    Shape("context, input, answers", (("context",), ("input", "question"), ("answers", "answer")), (), _question),
    Shape("input, outputs", (("input",), ("outputs",)), (("answer_prefix",),), _ruler),
    Shape("prompt, completion", (("prompt",), ("completion",)), (_SYSTEM, _TOOLS), _completion),
    Shape(
        "prompt, response",
        (("prompt", "question", "query", "input"), ("response", "answer", "answers", "output")),
        (_SYSTEM,),
        _answer,
    ),
    Shape("response of a batch", (("custom_id",), ("response",)), (), _answers_of_a_batch),
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


def read(shape: Shape, row: Row) -> Tokens | Text | Chat:
    """Read `row` by the columns of `shape`.

    Raises:
        RowError: if they can't be understood, or contradict each other.
    """
    if shape.name != "input_ids" and row.get("loss_mask") is not None:
        raise RowError(f"loss_mask stands beside {shape.name}, expected it beside input_ids")
    return shape.read({names[0]: one_of(row, names, "") for names in (*shape.needs, *shape.also)})


def unread(shape: Shape, row: Row) -> Sequence[str]:
    """List the columns of `row` that hold a value but are not read."""
    return [str(name) for name, value in row.items() if value is not None and name not in shape.columns]
