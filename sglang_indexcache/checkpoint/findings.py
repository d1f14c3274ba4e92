"""What extensions find out about a pattern, a launch line or an override, for `indexcache-check` and the launcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.extensions import extensions, first_made
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.sglang.asked import Asked


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found, one line each.

    Attributes:
        problems: what would be refused, or is not what was asked for.
        warnings: reasons to doubt a pattern that fits.
        notes: checks that were left out, and where the pattern is from.
        lines: a paragraph for people.
        content: the same for `--json`.
    """

    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    content: Any = field(default_factory=dict)

    def remarks(self) -> list[str]:
        """Return a line for each note and each warning, for people."""
        return [*(f"note: {note}" for note in self.notes), *(f"warning: {warning}" for warning in self.warnings)]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A pattern that is checked.

    Attributes:
        pattern: the pattern.
        spec: its name, and its file, if it is of one.
        checkpoint: the model, without overrides; `None` where none is named.
        overrides: the user's `--json-model-override-args`.
        merged: whether the pattern can be added to them.
        unpacked: an SGLang to read instead of the installed one.
    """

    pattern: Pattern
    spec: PatternSpec
    checkpoint: Checkpoint | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    merged: bool = True
    unpacked: Path | None = None


class Remarks(ABC):
    """Remarks of an extension of the group `remarks` on patterns that are checked; made without arguments."""

    @abstractmethod
    def on(self, checked: Checked) -> Findings:
        """Return what there is to say: no problems, which are for the check itself."""


class Listing(ABC):
    """An option of `indexcache-check` that needs no pattern, by the name of its entry point in the group `listings`.

    Attributes:
        help: what it prints.
        reads_sglang: whether it reads an SGLang: the installed one, or an unpacked one.
    """

    help: ClassVar[str]
    reads_sglang: ClassVar[bool] = False

    @abstractmethod
    def find(self, unpacked: Path | None) -> Findings:
        """Return what it prints; problems are exit code 1."""


class Launch(ABC):
    """A launch line that an extension has read.

    Attributes:
        asked: what it asks of us, by flags or by variables in front of it.
        arguments: its flags under the names of SGLang's server arguments, as the newest SGLang reads them; any other
            attribute is `None`.
    """

    asked: Asked
    arguments: Any

    @abstractmethod
    def check(self, checked: Checked, written: str) -> Findings:
        """Judge the line with a pattern, as the launcher would; its own override only where no model is named.

        Args:
            checked: the pattern.
            written: its name as the user wrote it.
        """


class Launches(ABC):
    """What an extension of the group `launches` knows of launch lines of SGLang; made without arguments."""

    @abstractmethod
    def arguments(self, words: Sequence[str]) -> Any:
        """Return the flags behind the program, see `Launch.arguments`."""

    @abstractmethod
    def read(self, text: str, unpacked: Path | None) -> Launch:
        """Read a line as a shell does, for the SGLang that is installed, or for an unpacked one.

        Raises:
            IndexCacheError: if it can't be split, or flags of ours contradict each other.
        """

    @abstractmethod
    def tell(self, spec: PatternSpec, asked: Asked, words: Sequence[str]) -> Iterable[str]:
        """Return what is known of a pattern together with SGLang's flags, a line each; `refuse` what can't be.

        Raises:
            IndexCacheError: if one of them can't be combined with it.
        """

    @abstractmethod
    def alone(self, model: str, overrides: str, unpacked: Path | None) -> Findings:
        """Say which layers `--json-model-override-args` alone would run, without the launcher.

        Raises:
            IndexCacheError: if the model or the override can't be read, or the override says nothing of roles.
        """


def remarks_on(checked: Checked) -> Findings:
    """Return the remarks of all extensions.

    Raises:
        ExtensionError: if one can't be loaded.
    """
    found = [each().on(checked) for each in extensions("remarks", Remarks).values()]
    return Findings(
        warnings=tuple(line for item in found for line in item.warnings),
        notes=tuple(line for item in found for line in item.notes),
        lines=tuple(line for item in found for line in item.lines),
        content={name: value for item in found for name, value in item.content.items()},
    )


def launches() -> Launches | None:
    """Return what reads launch lines; `None` where no extension does."""
    found: Launches | None = first_made("launches", Launches)
    return found


def reader(option: str) -> Launches:
    """Return what reads launch lines, which an option needs.

    Raises:
        IndexCacheError: if no extension does.
    """
    found = launches()
    if found is None:
        raise IndexCacheError(
            f"{option} needs an extension that reads launch lines (indexcache.launches): none is here"
        )
    return found
