"""The pattern: which layers select what they attend to, and which reuse a selection."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Self

from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.messages import BEGINS_SHARED, NO_INDEXER, OTHER_LENGTH
from sglang_indexcache.pattern.indexer_setting import CANDIDATES, DEFINITION, NO_CANDIDATES, IndexerSetting
from sglang_indexcache.pattern.selection import PatternSelection, selection_type

FULL, SHARED = "F", "S"
DENSE = "D"  # with a selection
_RETENTION = re.compile(r"[0-9]{1,4}/[1-9][0-9]{0,3}|[0-9](\.[0-9]{1,9})?|\.[0-9]{1,9}")


@dataclass(frozen=True)
class Pattern:
    """One role for each layer that can select, and with a `selection` what is selected there.

    Without one (DSA models, IndexCache): an `F` layer runs its own indexer, an `S` layer reuses the top-k indices of
    the nearest `F` layer before it. With one (dense models, DELTA): a `D` layer attends to everything, an `F` layer to
    the pages that it selects itself, an `S` layer to those that the nearest `D` or `F` layer before it selected. Layers
    are numbered from 0, as engines do; the papers count from 1.

    An `F` layer of DSA models may also select for a block of neighbouring prompt queries at a time.

    Args:
        roles: one letter a layer, for instance `"FSSSFSSS"`; the first one is `F`, or `D`.
        selection: `None` for `F` and `S` alone.
        indexers: the `F` layers that select in blocks, by layer.

    Raises:
        PatternError: if `roles` is empty, holds another letter, or begins with `S`, or an indexer is not of an `F`
            layer.
    """

    roles: str
    selection: PatternSelection | None = None
    indexers: tuple[IndexerSetting, ...] = ()

    def __post_init__(self) -> None:
        letters, expected = ((DENSE, FULL, SHARED), "D, F or S") if self.dense else ((FULL, SHARED), "F or S")
        if not isinstance(self.roles, str):
            raise PatternError(f"pattern is {type(self.roles).__name__}, expected a string of {expected}")
        if not self.roles:
            raise PatternError(f"pattern is empty, expected one letter {expected} for each layer")
        for layer, letter in enumerate(self.roles):
            if letter == CANDIDATES:
                raise PatternError(f"pattern has C for layer {layer}, but {NO_CANDIDATES}; expected {expected}")
            if letter not in letters:
                more = " (D needs a selection)" if letter == DENSE else ""
                more = " in capitals" if letter.upper() in letters else more
                raise PatternError(f"pattern has {letter!r} for layer {layer}, expected {expected}{more}")
        if self.roles[0] == SHARED:
            raise PatternError(
                f"{BEGINS_SHARED}, but layer 0 has no earlier layer to share from; expected {self.full_role}"
            )
        self._check_indexers()

    def _check_indexers(self) -> None:
        """Check that every indexer is of an `F` layer."""
        if self.indexers and self.dense:
            raise PatternError(f"pattern has a selection, so no indexer; found {self.indexers[0]}")
        layers = [indexer.layer for indexer in self.indexers]
        if layers != sorted(set(layers)):
            raise PatternError(f"indexers are of layers {', '.join(map(str, layers))}, expected each once, ascending")
        for indexer in self.indexers:
            if indexer.layer >= len(self.roles):
                raise PatternError(f"{indexer} is of layer {indexer.layer}, expected 0 to {len(self.roles) - 1}")
            found = self.roles[indexer.layer]
            if found != FULL:
                raise PatternError(f"{indexer} is of F layers, but layer {indexer.layer} is {found}")

    @classmethod
    def parse(cls, text: str, selection: PatternSelection | None = None) -> Self:
        """Read roles and indexers as `letters` writes them: `FSSFSSFS+3q16+6q4`.

        Raises:
            PatternError: if `text` has another form.
        """
        roles, *indexers = text.split("+")
        return cls(roles, selection, tuple(map(IndexerSetting.parse, indexers)))

    @property
    def dense(self) -> bool:
        """True for dense models, whose layers attend to everything or to the pages of a selection."""
        return self.selection is not None

    @property
    def full_role(self) -> str:
        """Letter of a layer that a search may turn into `S`: `F`, or `D` for dense models."""
        return DENSE if self.dense else FULL

    @classmethod
    def full(cls, num_layers: int, shared: Collection[int] = (), selection: PatternSelection | None = None) -> Self:
        """Return the pattern in which only the layers in `shared` are `S`."""
        letter = FULL if selection is None else DENSE
        return cls("".join(SHARED if layer in shared else letter for layer in range(num_layers)), selection)

    @classmethod
    def uniform(
        cls, num_layers: int, keep_every: int, phase: int = 0, selection: PatternSelection | None = None
    ) -> Self:
        """Return the paper's uniform interleaving: every `keep_every`-th layer is `F` (4: `FSSSFSSS...`).

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
    def from_full_layers(
        cls, num_layers: int, full_layers: Iterable[int], selection: PatternSelection | None = None
    ) -> Self:
        """Return the pattern in which all layers but `full_layers` are `S`.

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
        """Read the text of a `key`.

        Raises:
            PatternError: if `key` has another form.
        """
        letters, mark, more = key.partition("|")
        blocks = more.startswith("blocks")
        pattern = cls.parse(letters, selection_type().parse(more) if mark and not blocks else None)
        if (blocks or pattern.indexers) and pattern.key != key:
            raise PatternError(f"{key[:80]} means another definition of a block, expected {pattern.key[:80]}")
        return pattern

    def keeping(self, full_layers: Iterable[int]) -> Self:
        """Return this pattern with all layers but `full_layers` turned into `S`.

        Raises:
            PatternError: as `from_full_layers`.
        """
        return self.from_full_layers(len(self), full_layers, self.selection)

    def neighbours(self, locked: Collection[int] = ()) -> Iterator[Pattern]:
        """Yield all patterns that trade one full layer for one `S`; layer 0 stays, and `locked` layers stay `S`."""
        for full in self.full_layers[1:]:
            for shared in self.shared_layers:
                if shared not in locked:
                    yield self.share(full).unshare(shared)

    def __str__(self) -> str:
        return self.letters

    def __len__(self) -> int:
        return len(self.roles)

    def __getitem__(self, layer: int) -> str:
        return self.roles[layer]

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that share nothing, ascending: they run their indexer, or attend to everything."""
        return tuple(layer for layer, role in enumerate(self.roles) if role == self.full_role)

    @cached_property
    def shared_layers(self) -> tuple[int, ...]:
        """Layers that reuse another layer's selection, ascending."""
        return tuple(layer for layer, role in enumerate(self.roles) if role == SHARED)

    @cached_property
    def own_layers(self) -> tuple[int, ...]:
        """F layers of a dense model, ascending: they attend to pages that they select themselves."""
        return tuple(layer for layer, role in enumerate(self.roles) if self.dense and role == FULL)

    @property
    def is_full(self) -> bool:
        """True if a model runs as it would without a pattern: no layer shares, selects in blocks, or selects pages."""
        return not self.shared_layers and not self.own_layers and not self.indexers

    @cached_property
    def source_layers(self) -> tuple[int, ...]:
        """The layer whose selection each layer uses: f(l) = max{j <= l : c_j is not S}."""
        sources: list[int] = []
        for layer, role in enumerate(self.roles):
            sources.append(sources[-1] if role == SHARED else layer)
        return tuple(sources)

    @property
    def retention(self) -> float:
        """Share of layers that are not `S`."""
        return len(self.full_layers) / len(self.roles)

    @cached_property
    def queries(self) -> dict[int, int]:
        """Prompt queries for which each full layer selects at a time; 1 if each query selects for itself."""
        blocks = {indexer.layer: indexer.queries for indexer in self.indexers}
        return {layer: blocks.get(layer, 1) for layer in self.full_layers}

    @property
    def indexer_cost(self) -> float:
        """Cost of scoring a long prompt, in full layers: one that selects for n queries at a time counts 1/n."""
        return sum(1 / queries for queries in self.queries.values())

    @property
    def letters(self) -> str:
        """One letter for each layer, then a `+` and its text for each indexer that selects in blocks."""
        return "+".join([self.roles, *map(str, self.indexers)])

    def beginning(self, layers: int) -> str:
        """Return `letters` of the first `layers` layers: patterns that agree there compute the same up to there."""
        return "+".join([self.roles[:layers], *(str(item) for item in self.indexers if item.layer < layers)])

    @property
    def key(self) -> str:
        """The whole pattern in one word: its letters, then a `|` and its selection or the definition of its blocks."""
        more = f"blocks{DEFINITION}" if self.indexers else self.selection
        return self.letters if more is None else f"{self.letters}|{more}"

    @property
    def order(self) -> tuple[str, str]:
        """A sort key that groups patterns whose first layers run alike."""
        return str(self.selection), self.letters

    @property
    def pattern(self) -> Self:
        """The pattern itself; what is no pattern, but is evaluated like one, has none."""
        return self

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of `key`, in hex: equal on two machines if and only if they run the same pattern."""
        return hashlib.sha256(self.key.encode("ascii")).hexdigest()

    def share(self, layer: int) -> Self:
        """Return this pattern with `layer` flipped from `F` or `D` to `S`.

        Raises:
            PatternError: if the layer does not exist, is something else, or is layer 0.
        """
        return self._flipped(layer, self.full_role, SHARED)

    def unshare(self, layer: int) -> Self:
        """Return this pattern with `layer` flipped from `S` to `F` or `D`.

        Raises:
            PatternError: if the layer does not exist, or is something else.
        """
        return self._flipped(layer, SHARED, self.full_role)

    def _flipped(self, layer: int, before: str, after: str) -> Self:
        if not 0 <= layer < len(self) or self.roles[layer] != before:
            raise PatternError(f"layer {layer} of {self.roles} is not an {before} layer")
        roles = self.roles[:layer] + after + self.roles[layer + 1 :]
        return replace(self, roles=roles, indexers=tuple(self._other_indexers(layer)))

    def selecting_for(self, layer: int, queries: int) -> Self:
        """Return this pattern with an `F` layer that selects for `queries` prompt queries at a time; 1 for each alone.

        Raises:
            PatternError: if the layer is not `F`, or `queries` is not allowed.
        """
        indexers = self._other_indexers(layer)
        if queries > 1:
            indexers.append(IndexerSetting(layer=layer, queries=queries))
        return replace(self, indexers=tuple(sorted(indexers, key=lambda item: item.layer)))

    def _other_indexers(self, layer: int) -> list[IndexerSetting]:
        """Return the indexers of all layers but `layer`."""
        return [item for item in self.indexers if item.layer != layer]

    def check_fits(self, num_layers: int, locked: Collection[int] = ()) -> None:
        """Check the pattern against a model.

        Args:
            num_layers: layers of the model that can select.
            locked: layers that are shared in the checkpoint; they have no indexer weights and can't be `F`.

        Raises:
            PatternError: if the length differs, or a locked layer is `F`.
        """
        if len(self) != num_layers:
            raise PatternError(OTHER_LENGTH.format(len(self), num_layers))
        wrong = [layer for layer in sorted(locked) if self.roles[layer] == FULL]
        if wrong:
            names = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
            raise PatternError(f"pattern has F for layer {names}, but the checkpoint has {NO_INDEXER}; expected S")

    def check_plain(self, why: str) -> None:
        """Check that no layer selects in blocks; `why` completes the message, behind the indexer's name.

        Raises:
            PatternError: if one does.
        """
        if self.indexers:
            raise PatternError(f"{self.indexers[0]} {why}; expected F and S alone")

    def plain(self) -> Self:
        """Return this pattern with all layers selecting for each query by itself."""
        return replace(self, indexers=())

    def check_kind(self, native: Pattern) -> None:
        """Check that this pattern's letters suit a model whose own pattern is `native`.

        Raises:
            PatternError: if one has a selection and the other has indexers.
        """
        if native.dense and not self.dense:
            raise PatternError(
                "pattern is of F and S without a selection, the model is dense; expected D and S with one"
            )
        if self.dense and not native.dense:
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
    """Return the number of `F` layers at `retention`: rounded up, as in uniform interleaving (78 layers at 1/4: 20)."""
    return math.ceil(num_layers * retention)


def uniform_pattern(
    native: Pattern, retention: Fraction, phase: int = 0, locked: Collection[int] | None = None
) -> Pattern:
    """Return the paper's uniform pattern at `retention`, for a checkpoint whose own pattern is `native`.

    Where layers are locked, each `F` moves to the nearest layer that can be one; of two, to the first.

    Args:
        native: the checkpoint's own.
        retention: 1/n.
        phase: see `Pattern.uniform`.
        locked: layers that can't be `F`; `None` for those that `native` shares.

    Raises:
        PatternError: if the retention is not 1/n, or fewer layers can be `F` than it keeps.
    """
    if retention.numerator != 1:
        raise PatternError(f"uniform needs retentions of the form 1/n, found {retention}")
    pattern = Pattern.uniform(len(native), retention.denominator, phase, native.selection)
    locked = native.shared_layers if locked is None else locked
    free = [layer for layer in range(len(native)) if layer not in locked]
    places = pattern.full_layers
    if len(places) > len(free):
        raise PatternError(
            f"uniform {retention} keeps {len(places)} of {len(native)} layers {pattern.full_role}, but the checkpoint"
            f" has indexers for {len(free)}; expected a smaller retention"
        )
    kept: list[int] = []
    for number, place in enumerate(places):
        first = free.index(kept[-1]) + 1 if kept else 0
        reachable = free[first : len(free) - (len(places) - number - 1)]
        kept.append(min(reachable, key=lambda layer, place=place: abs(layer - place)))  # type: ignore[misc]
    return native.keeping(kept)
