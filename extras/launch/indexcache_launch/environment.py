"""The features of this plugin on an SGLang: the table of `indexcache-check --environment`."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from sglang_indexcache.families import known_families
from sglang_indexcache.families.dsa.blocks.adapter import with_blocks
from sglang_indexcache.families.dsa.sglang import by_configuration
from sglang_indexcache.io.extensions import extensions
from sglang_indexcache.io.refusal import UNREAD_FLAG
from sglang_indexcache.sglang.probes import FEATURES, REQUIRED, Feature, SglangSource
from sglang_indexcache.sglang.read_sources import never_run


@dataclass(frozen=True)
class FeatureRow:
    """A feature and whether it is enabled.

    Attributes:
        required: a server is refused without it.
        refused: why it is not enabled; `None` if it is.
        unread: one line if it replaces a function whose source is none that was read; a server is refused then, too,
            unless that is allowed.
        otherwise: what happens without it.
    """

    name: str
    does: str
    required: bool
    refused: str | None
    otherwise: str
    unread: str | None = None


def family_features() -> tuple[Feature, ...]:
    """List the features of the families and of added measures beside `FEATURES`, each once."""
    features: list[Feature | None] = []
    for served in (family.sglang for family in known_families()):
        configured, blocks = by_configuration(served), with_blocks(served)
        features += [served.serving, served.pipeline, None if configured is None else configured.rule]
        features += [] if blocks is None else [blocks.blocks, blocks.sharding, blocks.grouping, blocks.context]
        features += served.variants
    features += [measure.feature for measure in extensions("measures", object).values()]
    return tuple(dict.fromkeys(item for item in features if item is not None))


def all_features() -> tuple[Feature, ...]:
    """List every feature."""
    return (*FEATURES, *family_features())


@dataclass(frozen=True)
class Environment:
    """All features, for one SGLang."""

    sglang: str
    path: str
    features: tuple[FeatureRow, ...]

    @classmethod
    def of(cls, source: SglangSource) -> Environment:
        """Check an SGLang for all features."""
        rows = tuple(
            FeatureRow(one.name, one.does, one in REQUIRED, source.refusal(one), one.otherwise, source.unread(one))
            for one in all_features()
        )
        return cls(source.version, str(source.root), rows)

    @property
    def can_serve(self) -> bool:
        """True if all that is required is there, and some family of models can be served."""
        families = {family.sglang.serving.name for family in known_families()}
        required = all(row.refused is None for row in self.features if row.required)
        return required and any(row.refused is None for row in self.features if row.name in families)

    def as_text(self) -> str:
        """Return the table for people."""
        lines = [f"SGLang {self.sglang} in {self.path}", ""]
        width = max(len(row.name) for row in self.features) + 2
        margin = " " * (9 + width)
        for row in self.features:
            why = row.refused or row.unread
            state = "enabled" if why is None else "refused" if row.refused else "unread"
            lines.append(f"{state:<9}{row.name:<{width}}{row.does}")
            if why is not None:
                lines += textwrap.wrap(
                    why, 100, initial_indent=margin, subsequent_indent=margin, break_long_words=False
                )
                otherwise = row.otherwise if row.refused else f"no server with it, without {UNREAD_FLAG}"
                lines.append(f"{margin}then: {otherwise}")
        unknown = never_run(self.sglang)
        lines += ["", "patterns can be served" if self.can_serve else "patterns can't be served with this SGLang"]
        lines += [f"warning: {unknown}"] if unknown is not None and self.can_serve else []
        return "\n".join(lines)
