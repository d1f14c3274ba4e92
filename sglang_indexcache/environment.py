"""What this plugin can do with an SGLang: the feature table of `indexcache-check --environment`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sglang_indexcache.probes import FEATURES, REQUIRED, SglangSource


@dataclass(frozen=True)
class Row:
    """A feature and whether it is enabled.

    Attributes:
        required: a server is refused without it.
        refused: why it is not enabled, `None` if it is.
        otherwise: what happens then.
    """

    name: str
    does: str
    required: bool
    refused: str | None
    otherwise: str


@dataclass(frozen=True)
class Environment:
    """All features, for one SGLang."""

    sglang: str
    path: str
    features: tuple[Row, ...]

    @classmethod
    def of(cls, source: SglangSource) -> Environment:
        rows = (
            Row(feature.name, feature.does, feature in REQUIRED, source.refusal(feature), feature.otherwise)
            for feature in FEATURES
        )
        return cls(source.version, str(source.root), tuple(rows))

    @property
    def can_serve(self) -> bool:
        return all(row.refused is None for row in self.features if row.required)

    def as_text(self) -> str:
        lines = [f"SGLang {self.sglang} in {self.path}", ""]
        for row in self.features:
            state = "enabled" if row.refused is None else "refused"
            lines.append(f"{state:<9}{row.name:<10}{row.does}")
            if row.refused is not None:
                lines += textwrap.wrap(row.refused, 100, initial_indent=" " * 19, subsequent_indent=" " * 19)
                lines.append(f"{'':<19}then: {row.otherwise}")
        lines += ["", "patterns can be served" if self.can_serve else "patterns can't be served with this SGLang"]
        return "\n".join(lines)
