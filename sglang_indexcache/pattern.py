"""The pattern: which layers choose what they attend to, and which reuse the choice."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Self

from sglang_indexcache.errors import PatternError
from sglang_indexcache.selection import Selection

FULL, SHARED = "F", "S"
DENSE = "D"  # with a selection
_RETENTION = re.compile(r"[0-9]{1,4}/[1-9][0-9]{0,3}|[0-9](\.[0-9]{1,9})?|\.[0-9]{1,9}")


@dataclass(frozen=True)
class Pattern:
    """One role for each layer that can choose, and with a `selection` what is chosen there.

    Without one (DSA models, IndexCache): an `F` layer runs its own indexer, an `S` layer reuses the top-k indices of
    the nearest `F` layer before it. With one (dense models, DELTA): a `D` layer attends to everything, an `F` layer to
    the pages that it chooses itself, an `S` layer to those that the nearest `D` or `F` layer before it chose.
    Layers are numbered from 0, as engines do; the papers count from 1.

    Args:
        roles: one letter a layer, for instance `"FSSSFSSS"`; the first one is not `S`.
        selection: `None` for `F` and `S` alone.

    Raises:
        PatternError: if `roles` is empty, holds another letter, or begins with `S`.
    """

    roles: str
    selection: Selection | None = None

    def __post_init__(self) -> None:
        letters = (FULL, SHARED) if self.selection is None else (DENSE, FULL, SHARED)
        expected = "F or S" if self.selection is None else "D, F or S"
        if not isinstance(self.roles, str):
            raise PatternError(f"pattern is {type(self.roles).__name__}, expected a string of {expected}")
        if not self.roles:
            raise PatternError(f"pattern is empty, expected one letter {expected} for each layer")
        for layer, letter in enumerate(self.roles):
            if letter not in letters:
                more = " (D needs a selection)" if letter == DENSE else ""
                raise PatternError(f"pattern has {letter!r} for layer {layer}, expected {expected}{more}")
        if self.roles[0] == SHARED:
            raise PatternError(
                f"pattern begins with S, but layer 0 has no earlier layer to share from; expected {self.letter}"
            )

    @property
    def letter(self) -> str:
        """That of a layer of the native pattern, which a search turns into `S`: `F`, or `D` with a selection."""
        return FULL if self.selection is None else DENSE

    @classmethod
    def full(cls, num_layers: int, shared: Collection[int] = (), selection: Selection | None = None) -> Self:
        """The pattern that shares nothing but the layers in `shared`."""
        letter = FULL if selection is None else DENSE
        return cls("".join(SHARED if layer in shared else letter for layer in range(num_layers)), selection)

    @classmethod
    def uniform(cls, num_layers: int, keep_every: int, phase: int = 0, selection: Selection | None = None) -> Self:
        """The paper's uniform interleaving: every `keep_every`-th layer is `F` (4: `FSSSFSSS...`).

        With `phase` p the `F` layers after layer 0 are p, p + keep_every, ... (for p = 0: keep_every, 2 keep_every,
        ...), as many as at phase 0, so that all phases cost the same.

        Raises:
            PatternError: if `keep_every` is not positive or `phase` not in 0 ... keep_every - 1.
        """
        if keep_every < 1 or not 0 <= phase < keep_every:
            raise PatternError(f"uniform with keep_every={keep_every}, phase={phase}: expected 0 <= phase < keep_every")
        count = math.ceil(num_layers / keep_every)
        first = phase or keep_every
        layers = [0, *range(first, num_layers, keep_every)][:count]
        return cls.from_full_layers(num_layers, layers, selection)

    @classmethod
    def from_full_layers(cls, num_layers: int, full_layers: Iterable[int], selection: Selection | None = None) -> Self:
        """The pattern that shares all layers but `full_layers`.

        Raises:
            PatternError: if a layer lies outside the model, or layer 0 is not among them.
        """
        layers = set(full_layers)
        outside = sorted(layer for layer in layers if not 0 <= layer < num_layers)
        if outside:
            raise PatternError(f"layer {outside[0]} is outside the model's layers 0 to {num_layers - 1}")
        letter = FULL if selection is None else DENSE
        return cls("".join(letter if layer in layers else SHARED for layer in range(num_layers)), selection)

    @classmethod
    def from_key(cls, key: str) -> Self:
        """Read back what `key` gives.

        Raises:
            PatternError: if it is something else.
        """
        roles, mark, selection = key.partition("|")
        return cls(roles, Selection.parse(selection) if mark else None)

    def keeping(self, full_layers: Iterable[int]) -> Self:
        """This pattern with all layers shared but `full_layers`.

        Raises:
            PatternError: as `from_full_layers`.
        """
        return self.from_full_layers(len(self), full_layers, self.selection)

    def neighbours(self, locked: Collection[int] = ()) -> Iterator[Pattern]:
        """All patterns that trade one full layer for one `S`; layer 0 stays, and `locked` layers stay `S`."""
        for full in self.full_layers[1:]:
            for shared in self.shared_layers:
                if shared not in locked:
                    yield self.share(full).unshare(shared)

    def __str__(self) -> str:
        return self.roles

    def __len__(self) -> int:
        return len(self.roles)

    def __getitem__(self, layer: int) -> str:
        return self.roles[layer]

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """The layers that share nothing: they run their indexer, or attend to everything. Ascending."""
        return tuple(layer for layer, role in enumerate(self.roles) if role == self.letter)

    @cached_property
    def shared_layers(self) -> tuple[int, ...]:
        """The layers that reuse another layer's choice, ascending."""
        return tuple(layer for layer, role in enumerate(self.roles) if role == SHARED)

    @cached_property
    def source_layers(self) -> tuple[int, ...]:
        """For each layer the one whose choice it uses: f(l) = max{j <= l : c_j is not S}."""
        sources: list[int] = []
        for layer, role in enumerate(self.roles):
            sources.append(sources[-1] if role == SHARED else layer)
        return tuple(sources)

    @property
    def retention(self) -> float:
        """Share of layers that share nothing."""
        return len(self.full_layers) / len(self.roles)

    @property
    def key(self) -> str:
        """All that the pattern says, in one word: its letters, and behind a `|` its selection."""
        return self.roles if self.selection is None else f"{self.roles}|{self.selection}"

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of `key`, in hex: equal on two machines if and only if they run the same pattern."""
        return hashlib.sha256(self.key.encode("ascii")).hexdigest()

    def share(self, layer: int) -> Self:
        """This pattern with `layer` flipped from `F` or `D` to `S`.

        Raises:
            PatternError: if the layer is not there, is something else, or is layer 0.
        """
        return self._flipped(layer, self.letter, SHARED)

    def unshare(self, layer: int) -> Self:
        """This pattern with `layer` flipped from `S` to `F` or `D`.

        Raises:
            PatternError: if the layer is not there, or is something else.
        """
        return self._flipped(layer, SHARED, self.letter)

    def _flipped(self, layer: int, before: str, after: str) -> Self:
        if not 0 <= layer < len(self) or self.roles[layer] != before:
            raise PatternError(f"layer {layer} of {self.roles} is not an {before} layer")
        return replace(self, roles=self.roles[:layer] + after + self.roles[layer + 1 :])

    def check_fits(self, num_layers: int, locked: Collection[int] = ()) -> None:
        """Check the pattern against a model.

        Args:
            num_layers: how many layers of the model can choose.
            locked: layers that are shared in the checkpoint; they have no indexer weights and can't be `F`.

        Raises:
            PatternError: if the length differs, or a locked layer is `F`.
        """
        if len(self) != num_layers:
            kind = "DSA layers" if self.selection is None else "layers"
            raise PatternError(f"pattern has {len(self)} letters, model has {num_layers} {kind}")
        wrong = [layer for layer in sorted(locked) if self.roles[layer] == FULL]
        if wrong:
            names = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
            raise PatternError(f"pattern has F for layer {names}, but the checkpoint has no indexer there; expected S")

    def check_kind(self, native: Pattern) -> None:
        """Check that a model with the pattern `native` has what this pattern's letters are about.

        Raises:
            PatternError: if one has a selection and the other an indexer.
        """
        if self.selection is None and native.selection is not None:
            raise PatternError(
                "pattern is of F and S without a selection, the model is dense; expected D and S with one"
            )
        if self.selection is not None and native.selection is None:
            raise PatternError("pattern has a selection, but the model's own indexers choose; expected F and S alone")


def parse_retention(text: str) -> Fraction:
    """Parse a retention: a fraction (`1/4`, four digits at most on either side) or a decimal (`0.25`), 0 < r <= 1.

    Raises:
        PatternError: if it is neither, or out of range.
    """
    if not _RETENTION.fullmatch(text.strip()):
        raise PatternError(f"retention is {text[:40]!r}, expected a fraction like 1/4 or a decimal like 0.25")
    retention = Fraction(text.strip())
    if not 0 < retention <= 1:
        raise PatternError(f"retention is {text}, expected more than 0 and at most 1")
    return retention


def full_layer_count(num_layers: int, retention: Fraction) -> int:
    """How many layers stay `F` at `retention`: rounded up, as uniform interleaving has it (78 layers at 1/4: 20)."""
    return math.ceil(num_layers * retention)


def uniform_pattern(native: Pattern, retention: Fraction, phase: int = 0) -> Pattern:
    """The paper's uniform pattern at `retention`, for a checkpoint whose own pattern is `native`.

    Raises:
        PatternError: if the retention is not 1/n, or a locked layer would have to be `F`.
    """
    if retention.numerator != 1:
        raise PatternError(f"uniform needs retentions of the form 1/n, found {retention}")
    pattern = Pattern.uniform(len(native), retention.denominator, phase, native.selection)
    try:
        pattern.check_fits(len(native), native.shared_layers)
    except PatternError as error:
        raise PatternError(f"uniform {retention}: {error}") from None
    return pattern
