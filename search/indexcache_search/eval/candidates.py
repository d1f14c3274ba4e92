"""Read which patterns of a model, or which servers, are compared."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from indexcache_search.data.sketch import Sketch
from indexcache_search.engines.base import Engine
from indexcache_search.engines.registry import Surroundings, kind_of
from indexcache_search.engines.settings import RunSettings
from indexcache_search.errors import SearchError
from indexcache_search.eval import measure, result
from indexcache_search.eval.held_out import ComparisonSet
from indexcache_search.eval.measure import Compared, Done
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.plan import Plan
from indexcache_search.hf.loading import describe_model
from indexcache_search.results.names import file_names, suffix, unique_names
from indexcache_search.results.schema import ComparisonResult
from indexcache_search.results.variant import NAMED, Variant, uniform_lines
from indexcache_search.results.words import serving_flags
from indexcache_search.strategies.budget.layers import Prices
from indexcache_search.strategies.budget.pricing import column
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.http.address import Address
from sglang_indexcache.pattern import full_layer_count
from sglang_indexcache.pattern.selection import PatternSelection
from sglang_indexcache.pattern_file.file import split_retention
from sglang_indexcache.pattern_file.pattern_name import PatternSpec

Spec = tuple[str | None, PatternSpec]
"""A pattern of a command line, and the name given before it or None."""


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Patterns of one model, or servers, to compare. A study overrides the methods to compare other plans.

    Attributes:
        command: name of the command.
        noun: word for one of those compared.
        patterns: as of `spec.PatternSpec`, optionally with `NAME=` before it.
        retentions: compared for files that name none.
        uniform: also compare uniform patterns at all phases.
        endpoints: servers; the first is the baseline.
        selections: of dense models; each pattern is compared with each of these, instead of its file's.
    """

    command: ClassVar[str] = "indexcache-eval"
    noun: ClassVar[str] = "pattern"

    patterns: tuple[str, ...] = ()
    retentions: tuple[Fraction, ...] = ()
    uniform: bool = False
    endpoints: tuple[Address, ...] = ()
    selections: tuple[PatternSelection, ...] = ()

    def check(self) -> None:
        """Check that there is something to compare.

        Raises:
            SearchError: if there is nothing, or both kinds are named.
        """
        if bool(self.patterns) == bool(self.endpoints):
            raise SearchError("expected either --pattern or --endpoint")
        others = self.endpoints[1:]
        if len(set(others)) < len(others):
            raise SearchError("--endpoint: a server that is compared stands there twice, expected each once")
        if len(self.endpoints) == 1:
            raise SearchError("--endpoint: found one, expected a baseline server and one to compare it with")

    def reads(self) -> dict[str, Sequence[str]]:
        """Return the inputs by option, for `check_apart`."""
        return {"--pattern": file_names(self.patterns)}

    def describe(self, model: str, specs: Sequence[Spec], seq_len: int | None) -> ModelLayers:
        """Describe the model by its config.json; a dense one with the smallest selection of any pattern."""
        selections = self.selections or tuple(
            spec.file.selection for _, spec in specs if spec.file is not None and spec.file.selection is not None
        )  # positions behind the smallest selection count
        description = describe_model(model, min(selections, key=lambda item: item.tokens, default=None))
        if description.dense and self.endpoints:
            raise SearchError(
                "--endpoint reads the logprobs of prompts, which servers of dense models read as ever;"
                " expected --pattern"
            )
        return description

    def lines(self, specs: Sequence[Spec], model: ModelLayers) -> list[Variant]:
        """List the patterns to compare with the baseline.

        Raises:
            IndexCacheError: if a file was made for another model, or a pattern does not fit this one.
        """
        named = named_lines(specs, self.retentions, self.selections, model)
        return [*named, *(_uniform(named, model) if self.uniform else [])]

    def calibrated_on(self, specs: Sequence[Spec]) -> list[Sketch]:
        """Read the sketches of the patterns' calibration texts; files of earlier versions have none.

        Raises:
            SearchError: if a sketch can't be read.
        """
        sketches = []
        for _, spec in specs:
            if spec.file is None or spec.file.calibration is None or spec.file.calibration.sketch is None:
                continue
            try:
                sketches.append(Sketch.decode(spec.file.calibration.sketch))
            except ValueError:
                raise SearchError(
                    f"{spec.text}: calibration.sketch can't be read, expected what the search wrote"
                ) from None
        return sketches

    def prices(self, model: ModelLayers, notice: Callable[[str], None], named: str | None) -> Prices | None:
        """Return the times of layers by which patterns of `model` are compared, where there are such.

        `notice` hears why there are none, where a reader would expect them; `named` is a table that was asked for.
        """
        return column(model, notice, named)

    def engine(
        self, model: str, run: RunSettings, description: ModelLayers, around: Surroundings
    ) -> AbstractContextManager[Engine]:
        """Return what evaluates the lines of a model, for a `with` block."""
        return kind_of(run.engine, description).load(model, run, around)

    def parse(self, key: str) -> Plan:
        """Parse the key of a plan, see `Journal`."""
        return Pattern.from_key(key)

    def compared(
        self, engine: Engine, journal: Journal, lines: Sequence[Variant], built: ComparisonSet, done: Done
    ) -> list[Compared]:
        """Evaluate the baseline and `lines`; see `measure.patterns`."""
        return measure.patterns(engine, journal, lines, built, done)

    def figures(self, comparison: ComparisonResult) -> Mapping[str, str]:
        """Render figures of a study, by their titles."""
        return result.NO_FIGURES


def named_lines(
    specs: Sequence[Spec],
    retentions: Sequence[Fraction],
    selections: Sequence[PatternSelection],
    model: ModelLayers,
) -> list[Variant]:
    """List the requested patterns; see `Candidates`.

    Raises:
        IndexCacheError: if a file was made for another model, or a pattern does not fit this one.
    """
    asked = [
        (name, spec, kept, suffix(selection, selections), replace(pattern, selection=selection))
        for name, spec in specs
        for kept, pattern in spec.by_retention(model, tuple(dict.fromkeys(retentions)))
        for selection in selections or (pattern.selection,)
    ]
    names = unique_names([(name, spec, f"{more} {kept}") for name, spec, kept, more, _ in asked])
    return [
        Variant(NAMED, name + more, kept, pattern, served=_served(spec, kept, pattern, model))
        for name, (_, spec, kept, more, pattern) in zip(names, asked, strict=True)
    ]


def _served(spec: PatternSpec, kept: Fraction | None, pattern: Pattern, model: ModelLayers) -> str | None:
    """Return how a server is told to run a pattern of a file, with the retention that was taken of it.

    Letters stand in the table, and a selection that is not the file's can't be named.
    """
    if spec.file is None or pattern.selection != spec.file.selection:
        return None
    asked = split_retention(spec.text)[1] is not None or pattern == spec.pattern(model)
    name = spec.text if asked or kept is None else f"{spec.text}@{kept}"
    return " ".join(["--indexcache-pattern", shlex.quote(name), *serving_flags(pattern.selection)])


def _uniform(named: Sequence[Variant], model: ModelLayers) -> list[Variant]:
    """List uniform patterns at all phases, with the retentions and selections of the named ones."""
    asked = [(line.retention, line.letters.selection) for line in named if line.letters is not None]
    lines = []
    for share, selection in dict.fromkeys(asked):
        if share is not None and full_layer_count(model.num_layers, share) < model.num_layers:
            more = suffix(selection, [other for _, other in asked])
            lines += uniform_lines(replace(model.native, selection=selection), share, more)
    return lines
