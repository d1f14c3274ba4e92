"""The F/S pattern: which DSA layers run their lightning indexer."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from sglang_indexcache.errors import PatternError

FULL, SHARED = "F", "S"
_RETENTION = re.compile(r"[0-9]{1,4}/[1-9][0-9]{0,3}|[0-9](\.[0-9]{1,9})?|\.[0-9]{1,9}")


@dataclass(frozen=True)
class Pattern:
    """One role for each DSA attention layer, the first one `F` (paper, Section 3).

    An `F` layer runs its own indexer; an `S` layer reuses the top-k indices of the nearest `F` layer before it.
    Layers are numbered from 0, as engines do; the paper counts from 1.

    Args:
        roles: one letter per layer, `F` or `S`, for instance `"FSSSFSSS"`.

    Raises:
        PatternError: if `roles` is empty, holds another letter, or does not begin with `F`.
    """

    roles: str

    def __post_init__(self) -> None:
        if not isinstance(self.roles, str):
            raise PatternError(f"pattern is {type(self.roles).__name__}, expected a string of F and S")
        if not self.roles:
            raise PatternError("pattern is empty, expected one letter F or S for each DSA layer")
        for layer, letter in enumerate(self.roles):
            if letter not in (FULL, SHARED):
                raise PatternError(f"pattern has {letter!r} for layer {layer}, expected F or S")
        if self.roles[0] != FULL:
            raise PatternError("pattern begins with S, but layer 0 has no earlier layer to share from; expected F")

    @classmethod
    def full(cls, num_layers: int, shared: Collection[int] = ()) -> Pattern:
        """The pattern with every layer `F` but those in `shared`."""
        return cls("".join(SHARED if layer in shared else FULL for layer in range(num_layers)))

    @classmethod
    def uniform(cls, num_layers: int, keep_every: int, phase: int = 0) -> Pattern:
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
        return cls.from_full_layers(num_layers, [0, *range(first, num_layers, keep_every)][:count])

    @classmethod
    def from_full_layers(cls, num_layers: int, full_layers: Iterable[int]) -> Pattern:
        """The pattern whose `F` layers are exactly `full_layers`.

        Raises:
            PatternError: if a layer lies outside the model, or layer 0 is not among them.
        """
        layers = set(full_layers)
        outside = sorted(layer for layer in layers if not 0 <= layer < num_layers)
        if outside:
            raise PatternError(f"layer {outside[0]} is outside the model's layers 0 to {num_layers - 1}")
        return cls("".join(FULL if layer in layers else SHARED for layer in range(num_layers)))

    def neighbours(self, locked: Collection[int] = ()) -> Iterator[Pattern]:
        """All patterns that trade one `F` for one `S`; layer 0 stays `F`, and `locked` layers stay `S`."""
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
        """The layers that run their indexer, ascending."""
        return tuple(layer for layer, role in enumerate(self.roles) if role == FULL)

    @cached_property
    def shared_layers(self) -> tuple[int, ...]:
        """The layers that reuse another layer's indices, ascending."""
        return tuple(layer for layer, role in enumerate(self.roles) if role == SHARED)

    @cached_property
    def source_layers(self) -> tuple[int, ...]:
        """For each layer the one whose indices it uses: f(l) = max{j <= l : c_j = F}."""
        sources: list[int] = []
        for layer, role in enumerate(self.roles):
            sources.append(layer if role == FULL else sources[-1])
        return tuple(sources)

    @property
    def retention(self) -> float:
        """Share of layers that keep their indexer."""
        return len(self.full_layers) / len(self.roles)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the pattern, in hex: equal on two machines if and only if they run the same pattern."""
        return hashlib.sha256(self.roles.encode("ascii")).hexdigest()

    def share(self, layer: int) -> Pattern:
        """This pattern with `layer` flipped from `F` to `S`.

        Raises:
            PatternError: if the layer is not there, is `S` already, or is layer 0.
        """
        if not 0 <= layer < len(self) or self.roles[layer] != FULL:
            raise PatternError(f"layer {layer} of {self.roles} is not an F layer")
        return Pattern(self.roles[:layer] + SHARED + self.roles[layer + 1 :])

    def unshare(self, layer: int) -> Pattern:
        """This pattern with `layer` flipped from `S` to `F`.

        Raises:
            PatternError: if the layer is not there, or is `F` already.
        """
        if not 0 <= layer < len(self) or self.roles[layer] != SHARED:
            raise PatternError(f"layer {layer} of {self.roles} is not an S layer")
        return Pattern(self.roles[:layer] + FULL + self.roles[layer + 1 :])

    def check_fits(self, num_layers: int, locked: Collection[int] = ()) -> None:
        """Check the pattern against a model.

        Args:
            num_layers: how many layers of the model can choose.
            locked: layers that are shared in the checkpoint; they have no indexer weights and can't be `F`.

        Raises:
            PatternError: if the length differs, or a locked layer is `F`.
        """
        if len(self) != num_layers:
            raise PatternError(f"pattern has {len(self)} letters, model has {num_layers} DSA layers")
        wrong = [layer for layer in sorted(locked) if self.roles[layer] == FULL]
        if wrong:
            names = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
            raise PatternError(f"pattern has F for layer {names}, but the checkpoint has no indexer there; expected S")


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
    pattern = Pattern.uniform(len(native), retention.denominator, phase)
    try:
        pattern.check_fits(len(native), native.shared_layers)
    except PatternError as error:
        raise PatternError(f"uniform {retention}: {error}") from None
    return pattern
