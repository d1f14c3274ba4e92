"""Names of patterns on command lines and in variables: `FILE`, `FILE@1/4`, `uniform@1/4`, or letters."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.quotes import unquoted
from sglang_indexcache.model.layers import ModelLayers
from sglang_indexcache.pattern import DENSE, FULL, SHARED, Pattern, parse_retention, uniform_pattern
from sglang_indexcache.pattern.indexer_setting import CANDIDATES
from sglang_indexcache.pattern.selection import PatternSelection, selection_type
from sglang_indexcache.pattern_file.file import PatternFile, split_retention
from sglang_indexcache.pattern_file.remote import remote_file

GRAMMAR = "FILE or, on the hub, org/name/FILE; FILE@1/4, uniform@1/4 or letters"
_UNIFORM = "uniform@"
_LETTERS = frozenset((DENSE, FULL, SHARED, CANDIDATES))  # C is refused as a letter, not missed as a file
_KEY = re.compile(r"^\W*(?:index_topk_pattern|indexer_types|pattern)\s*[=:]")
_BETWEEN = re.compile(r"[\s,;|\[\](){}-]+")
_WORDS = {"full": FULL, "shared": SHARED, "dense": DENSE}
_IN_INDEXERS = frozenset("0123456789qc+")


@dataclass(frozen=True)
class PatternSpec:
    """A pattern as somebody named it; `uniform@1/4` and a whole file mean something only with a model.

    Attributes:
        text: as it was written; of a file on the hub, with its commit.
        file: the pattern file, with the requested retention as its default.
        retention: the requested one, of a file or of uniform.
        letters: the pattern, if it was spelt out.
    """

    text: str
    file: PatternFile | None = None
    retention: Fraction | None = None
    letters: Pattern | None = None

    @classmethod
    def read(cls, text: str, selection: PatternSelection | None = None, assume: bool = False) -> PatternSpec:
        """Parse `text`, and read the file if it names one; a file whose name is all letters is `./FFSS`.

        Args:
            text: the name that somebody wrote.
            selection: selection of a pattern in letters.
            assume: whether letters with a `D` among them have the default one where there is none.

        Raises:
            IndexCacheError: if `text` names no pattern, or its file can't be read.
        """
        _check_spelling(text)
        if spells_letters(text):
            if DENSE in text:
                if selection is None and assume:
                    selection = selection_type().default()
                if selection is None:
                    raise PatternError(f"{text} has a D, which needs a selection; expected a pattern file")
            return cls(text, letters=Pattern.parse(text, selection))
        if text.startswith(_UNIFORM):
            return cls(text, retention=parse_retention(text.removeprefix(_UNIFORM)))
        path, retention = split_retention(text)
        if path.name == str(path) and not path.suffix and not os.path.lexists(path):
            raise PatternError(f"{text}: no such file, and not letters of a pattern; expected {GRAMMAR}")
        remote = remote_file(str(path))
        if remote is not None:
            pinned, _ = remote.download()
            text = str(pinned) if retention is None else f"{pinned}@{retention}"
        return cls(text, PatternFile.load(text), None if retention is None else parse_retention(retention))

    @property
    def is_uniform(self) -> bool:
        """True for `uniform@1/4`."""
        return self.file is None and self.letters is None

    @property
    def label(self) -> str:
        """A name for people: the strategy that found it, or that of the file."""
        if self.file is None:
            return "uniform" if self.letters is None else "letters"
        return self.file.search.strategy if self.file.search else Path(split_retention(self.text)[0]).stem

    def pattern(self, model: ModelLayers) -> Pattern:
        """Return the pattern for `model`, which it fits; of a whole file its default.

        Raises:
            IndexCacheError: if the file was made for another model, or the pattern does not fit this one.
        """
        if self.file is not None:
            self.file.model.check(model)
        pattern = self.unchecked(model.native)
        pattern.check_kind(model.native)
        pattern.check_fits(model.num_layers, model.locked)
        return pattern

    def unchecked(self, native: Pattern, locked: Collection[int] | None = None) -> Pattern:
        """Return the pattern for a checkpoint whose own pattern is `native`, without a check that it fits.

        Args:
            native: the checkpoint's own.
            locked: layers that uniform can't keep `F`; `None` for those that `native` shares.

        Raises:
            PatternError: if there is no such uniform pattern.
        """
        if self.is_uniform:
            assert self.retention is not None
            return uniform_pattern(native, self.retention, locked=locked)
        return self.known()

    def by_retention(self, model: ModelLayers, retentions: Sequence[Fraction]) -> list[tuple[Fraction, Pattern]]:
        """Return the pattern for `model` with its retention; of a file without a retention those at `retentions`.

        Before them, of a file that was found for a time of prompts, its own.

        Raises:
            IndexCacheError: as `pattern`, or if the file has none for a retention.
        """
        pattern = self.pattern(model)
        if self.file is not None and self.retention is None:
            own = [(_kept(pattern), pattern)] if self.file.search and self.file.search.within else []
            try:
                return [*own, *((retention, self.file.pattern_at(retention)) for retention in retentions)]
            except PatternError as error:
                raise PatternError(f"{self.text}: {error}; expected {self.text}@RETENTION, or --retain") from None
        return [(self.retention or _kept(pattern), pattern)]

    def known(self) -> Pattern:
        """Return the pattern where no model is at hand.

        Raises:
            PatternError: for `uniform@1/4`, which depends on the model's layers.
        """
        if self.letters is not None:
            return self.letters
        if self.file is None:
            raise PatternError(f"{self.text} depends on the model's layers, expected a pattern file or letters here")
        return self.file.as_pattern()


def _kept(pattern: Pattern) -> Fraction:
    return Fraction(len(pattern.full_layers), len(pattern))


def split_name(text: str) -> tuple[str | None, str]:
    """Split off `NAME=` before a pattern; a path may hold a `=` as well, behind a `/`."""
    name, mark, rest = text.partition("=")
    return (name, rest) if mark and name and "/" not in name else (None, text)


def spells_letters(text: str) -> bool:
    """Return whether `text` is a pattern's letters, and no file's name."""
    letters, _, indexers = text.partition("+")
    return bool(letters) and not set(letters) - _LETTERS and not set(indexers) - _IN_INDEXERS


def _check_spelling(text: str) -> None:
    """Refuse text that nobody means as a file's name: with quotes or white space around it, or small letters."""
    if os.path.exists(split_retention(text)[0]):  # noqa: PTH110 (Path.exists raises for names that are too long)
        return
    listed = _listed(text)
    if listed is not None:
        raise PatternError(f"{text}: a pattern is its letters side by side, and nothing else; expected {listed}")
    if unquoted(text) != text:
        raise PatternError(f"pattern is {text!r}, quotes or white space and all; expected {unquoted(text)}")
    meant = _in_capitals(text)
    if meant != text and spells_letters(meant):
        raise PatternError(f"{text}: letters of patterns are capitals, and there is no such file; expected {meant}")


def _in_capitals(text: str) -> str:
    letters = text.partition("+")[0]
    return letters.upper() + text[len(letters) :].lower()


def _listed(text: str) -> str | None:
    """Return the letters of a pattern that is written as engines' configurations or lists write it; `None` if not.

    `["F", "S"]`, `full, shared`, `F S`, letters on several lines, and either behind `index_topk_pattern=`.
    """
    value = _KEY.sub("", unquoted(text))
    items = [item for item in _BETWEEN.split(value) if item]
    meant = _in_capitals("".join(_WORDS.get(item.lower(), item) for item in items))
    return meant if meant != _in_capitals(unquoted(text)) and spells_letters(meant) else None
