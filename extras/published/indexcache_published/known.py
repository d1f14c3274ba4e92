"""The published patterns of the folder `files`, of others.

Their letters were compared with the source that each file names; what they lose was not measured by this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sglang_indexcache.io.errors import PatternFileError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.file import PatternFile, PublishedSection

FOLDER = Path(__file__).with_name("files")


@dataclass(frozen=True)
class KnownPattern:
    """A pattern that somebody published.

    Attributes:
        path: its pattern file in this package.
        file: the file's content.
        pattern: its pattern.
        published: who published it, where and when.
    """

    path: Path
    file: PatternFile
    pattern: Pattern
    published: PublishedSection

    @classmethod
    def load(cls, path: Path) -> KnownPattern:
        """Read one of the files.

        Raises:
            PatternFileError: if it does not say who published it.
        """
        file = PatternFile.load(path)
        if file.published is None:
            raise PatternFileError(f"{path}: published is missing, expected who published the pattern")
        return cls(path, file, file.as_pattern(), file.published)

    @property
    def label(self) -> str:
        """Description for people: whose, for which model, how many layers are F."""
        return f"{self.path.name} ({self.published.by}, for {self.file.model.name}, {self.kept} F)"

    @property
    def kept(self) -> str:
        """Number of F layers, of how many."""
        return f"{len(self.pattern.full_layers)} of {len(self.pattern)}"

    def is_for(self, architecture: str, num_layers: int) -> bool:
        """Return whether it was found for models of this architecture and depth, which is all that is known of it."""
        return (self.file.model.architecture, len(self.pattern)) == (architecture, num_layers)


@cache
def known_patterns() -> tuple[KnownPattern, ...]:
    """Return all published patterns, by the name of their file."""
    return tuple(KnownPattern.load(path) for path in sorted(FOLDER.glob("*.yaml")))


def as_text(patterns: Sequence[tuple[KnownPattern, Sequence[str]]]) -> str:
    """Return a paragraph for each pattern: path, model, letters, who published it, and what it is estimated to gain."""
    return "\n\n".join(
        f"{known.path}\n"
        f"  model      {known.file.model.name}: {known.file.model.architecture}, {len(known.pattern)} layers\n"
        f"  pattern    {known.pattern}\n"
        f"  kept       {known.kept} layers F\n"
        f"  published  {known.published.date} by {known.published.by}; not verified here\n"
        f"  source     {known.published.source}" + "".join(f"\n  estimate   {line}" for line in estimates)
        for known, estimates in patterns
    )
