"""What was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file import PatternFile


@dataclass(frozen=True)
class Request:
    """The pattern to serve.

    Attributes:
        source: the file and retention, as the user wrote it.
        file: its content.
        allow_config_mismatch: whether the file may be made for another config.json.
    """

    source: str
    file: PatternFile
    allow_config_mismatch: bool = False

    @property
    def pattern(self) -> Pattern:
        return self.file.as_pattern()

    def status(self) -> dict[str, str | int | float]:
        """What `/server_info` shows; plain types only."""
        return {
            "pattern": self.pattern.roles,
            "fingerprint": self.pattern.fingerprint,
            "retention": self.pattern.retention,
            "full_layers": len(self.pattern.full_layers),
            "shared_layers": len(self.pattern.shared_layers),
            "source": self.source,
        }
