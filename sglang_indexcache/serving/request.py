"""What was asked for, and what travels with the server arguments to schedulers that have lost the variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file import PatternFile
from sglang_indexcache.spec import PatternSpec

KEY = "indexcache"  # in SGLang's model overrides, in /server_info and in what a scheduler says when it is ready


@dataclass(frozen=True)
class Request:
    """The pattern to serve.

    Attributes:
        source: the file and retention, or the letters, as the user wrote it.
        pattern: what it says.
        file: its content; `None` for letters, and in a process that has the pattern from the server arguments, whose
            main process checked it.
        allow_config_mismatch: whether the file may be made for another config.json.
    """

    source: str
    pattern: Pattern
    file: PatternFile | None = None
    allow_config_mismatch: bool = False

    @classmethod
    def load(cls, spec: str, allow_config_mismatch: bool = False) -> Self:
        """Read what `spec` names.

        Raises:
            IndexCacheError: if it can't be used.
        """
        named = PatternSpec.read(spec)
        return cls(spec, named.known(), named.file, allow_config_mismatch)

    def carried(self) -> dict[str, str]:
        """What stands under `KEY` in the model overrides."""
        return {"source": self.source, "pattern": self.pattern.key}

    @classmethod
    def from_overrides(cls, text: str) -> Self:
        """Read back what `carried` put into `--json-model-override-args`.

        Raises:
            IndexCacheError: if it is not there.
        """
        content: Any = json.loads(text)
        section = content.get(KEY) if isinstance(content, Mapping) else None
        if not isinstance(section, Mapping) or set(section) != {"source", "pattern"}:
            raise IndexCacheError(f"the model overrides have no {KEY} section with source and pattern")
        return cls(str(section["source"]), Pattern.from_key(str(section["pattern"])))
