"""The requested pattern of an engine, and the form in which server arguments carry it to the schedulers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.refusal import PATTERN_VARIABLE
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.file import PatternFile
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.requested import KEY, CarriedPattern, Request


@dataclass(frozen=True)
class PatternRequest:
    """The pattern to serve, and how.

    Attributes:
        source: the file and retention, or the letters, as the user wrote it; of a file on the hub, with its commit.
        pattern: the pattern that it names; `None` for the model's own.
        file: content of the file; `None` for letters, and in a process that has the pattern from the server arguments,
            since the main process checked it.
        asked: what else the launch asks for.
    """

    source: str
    pattern: Pattern | None
    file: PatternFile | None = None
    asked: Asked = field(default_factory=Asked)

    @classmethod
    def load(cls, spec: str) -> Self:
        """Read what `spec` names.

        Raises:
            IndexCacheError: if it can't be used.
        """
        named = PatternSpec.read(spec)
        return cls(named.text, named.known(), named.file)

    @classmethod
    def of(cls, request: Request) -> Self:
        """Return the pattern that an engine requests.

        Raises:
            IndexCacheError: if it can't be used, or the environment and the engine's own overrides differ.
        """
        asked, own, carried = request.asked, request.own, request.carried
        found = cls("the model's own", None)
        if carried is not None:
            found = cls(carried.source, Pattern.from_key(carried.key))
        elif own is not None:
            found = cls.load(own) if isinstance(own, str) else cls._read_back(own)
        if carried is None and asked.pattern is not None:
            loaded = cls.load(asked.pattern)
            if own is not None and found.pattern != loaded.pattern:
                raise IndexCacheError(
                    f"{PATTERN_VARIABLE} asks for {loaded.pattern}, the {KEY} section of the model overrides for"
                    f" {found.pattern}; expected one of them"
                )
            found = loaded
        return replace(found, asked=asked)

    @property
    def carried(self) -> CarriedPattern | None:
        """The form of the pattern in server arguments; `None` for the model's own."""
        return None if self.pattern is None else CarriedPattern(source=self.source, key=self.pattern.key)

    @classmethod
    def _read_back(cls, section: Any) -> Self:
        if not isinstance(section, Mapping) or set(section) != {"source", "pattern"}:
            raise IndexCacheError(f"the {KEY} section of the model overrides is not a pattern, nor its source and key")
        return cls(str(section["source"]), Pattern.from_key(str(section["pattern"])))
