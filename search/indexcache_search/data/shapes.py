"""Columns that a row may have, and their meaning. The first matching shape is used; extensions add shapes.

They do so by entry points of the group `indexcache.shapes`, each a tuple of `Shape`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.templates import Turns
from indexcache_search.errors import RowError
from sglang_indexcache.io.extensions import extensions

Row = Mapping[str, Any]


class Cell(NamedTuple):
    """A value, and the user's name of where it stands, for messages."""

    value: Any
    name: str


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

    @classmethod
    def of(cls, prompt: NDArray[Any], reply: NDArray[Any]) -> Self:
        """Join a prompt and what a server wrote behind it."""
        tokens = np.concatenate([prompt, reply])
        return cls(tokens, np.arange(len(tokens)) >= len(prompt), written=True)


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
class Written:
    """Texts of a conversation.

    Attributes:
        texts: all of them.
        by_template: true if the tokenizer's chat template wrote them.
        apart: true if `auto` split the conversation.
        left_out: what the template left out, in words.
    """

    texts: list[Text]
    by_template: bool = True
    apart: bool = False
    left_out: Sequence[str] = ()


class Conversation(ABC):
    """What a tokenizer's chat template makes texts of."""

    @abstractmethod
    def written(self, tokenizer: Any, turns: Turns, replies: bool) -> Written:
        """Return the texts; with `replies` also the spans that the assistant wrote. See `RowOptions` for `turns`.

        Raises:
            RowError: if the template refuses it, or replies can't be separated from prompts.
            DataError: if there is no template, or it does not terminate.
        """


Content = Section | Text | Conversation


class Shape:
    """One way to write a row.

    Args:
        name: its columns, for messages.
        needs: required columns, a stroke between synonyms.
        also: optional columns, likewise.
        read: function of the columns of `needs` and `also`, by their first names.
        rank: place among the shapes, which are tried in this order.
        shown: its columns, in a message about a row of no shape; by default its name.
    """

    def __init__(
        self,
        name: str,
        needs: str,
        also: str,
        read: Callable[[Cells], Content],
        *,
        rank: int = 0,
        shown: str | None = None,
    ) -> None:
        self.name, self._read, self.rank, self.shown = name, read, rank, name if shown is None else shown
        self.needs = [names.split("/") for names in needs.split()]
        self._columns = self.needs + [names.split("/") for names in also.split()]

    def read(self, row: Row) -> Content:
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
    columns = {name: integers(*cell) for name, cell in row.items() if cell.value is not None}
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
    return Section.of(ids[kept], reply)


def integers(values: Any, name: str) -> NDArray[Any]:
    """Return `values` if they are a list of integers.

    Raises:
        RowError: if not.
    """
    with suppress(TypeError, ValueError, OverflowError):
        array = np.asarray(values)
        if array.ndim == 1 and (not len(array) or array.dtype.kind in ("iub" if name == "loss_mask" else "iu")):
            return array
    raise RowError(f"{name} is not a list of integers")


def string(value: Any, name: str) -> str:
    """Return `value` if it is a string.

    Raises:
        RowError: if not.
    """
    if not isinstance(value, str):
        raise RowError(f"{name} is {kind(value)}, expected a string")
    return value


def kind(value: Any) -> str:
    """Return the name of a value's type, for error messages."""
    return "null" if value is None else type(value).__name__


def one_of(item: Mapping[str, Any], names: Sequence[str], where: str = "") -> Cell:
    """Return the value under whichever of several synonymous `names` is set; without any, null under the first.

    Raises:
        RowError: if two of them hold different values.
    """
    found = [name for name in names if item.get(name) is not None]
    for name in found[1:]:
        if item[name] != item[found[0]]:
            raise RowError(f"{where}{found[0]} and {where}{name} differ, expected one of them")
    here = found or [name for name in names if name in item] or names
    return Cell(item.get(here[0]), f"{where}{here[0]}")


@cache
def shapes() -> tuple[Shape, ...]:
    """Return the shapes of this package and those of extensions, by rank.

    Raises:
        ExtensionError: if an extension can't be loaded.
    """
    own = (
        Shape("input_ids", "input_ids", "output_ids loss_mask labels attention_mask", _tokens),
        Shape("text", "text/content", "", lambda row: Text.of("", string(*row["text"])), rank=60),
    )
    added = (shape for more in extensions("shapes", tuple).values() for shape in more)
    return tuple(sorted((*own, *added), key=lambda shape: shape.rank))


def shape_of(row: Row) -> Shape:
    """Return the first shape whose required columns are set.

    Raises:
        RowError: if there is none.
    """
    for shape in shapes():
        if all(any(row.get(name) is not None for name in names) for names in shape.needs):
            return shape
    for shape in shapes():
        if all(any(name in row for name in names) for names in shape.needs):
            null = next(name for names in shape.needs for name in names if name in row and row[name] is None)
            raise RowError(f"{null} is null, expected a value")
    known = "; ".join(shape.shown for shape in shapes() if shape.shown)
    raise RowError(f"columns are {', '.join(map(str, row)) or 'missing'}, expected one of: {known}")
