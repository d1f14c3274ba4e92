"""Readings of a configuration by an engine, by version: which layers select, and which key says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

SGLANG = "SGLang"
READ_VERSIONS = tuple(  # of SGLang, whose sources were read for the rules of families, oldest first
    """
    0.5.11 0.5.12 0.5.12.post1 0.5.13 0.5.13.post1 0.5.14 0.5.15 0.5.15.post1 0.5.16 0.5.17 0.5.18 0.5.19 0.5.20 0.5.21
    0.5.22 0.5.23
    """.split()
)
OVERRIDE, CONFIG, FILLED = "override", "config.json", "configuration class"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Reading by one engine of a config.json with model overrides, when nothing of ours helps.

    Attributes:
        engine: its name.
        versions: those that read it alike, oldest first.
        roles: one letter for each layer that can select; `None` if the engine refuses the model.
        key: the key that decides; `None` if none does, or it is not known.
        source: who says that key: `override`, `config.json` or `configuration class`.
        ignored: keys of the overrides without effect.
        line: all of that for people.
    """

    engine: str
    versions: tuple[str, ...]
    roles: str | None
    key: str | None
    source: str | None
    ignored: tuple[str, ...]
    line: str

    @property
    def name(self) -> str:
        """The engine and its versions: `SGLang 0.5.20 to 0.5.23`."""
        return named(self.engine, self.versions)

    def at(self, version: str) -> Reading:
        """Return what one of the versions reads."""
        return replace(self, versions=(version,), line=self.line.replace(self.name, named(self.engine, (version,)), 1))


def named(engine: str, versions: tuple[str, ...]) -> str:
    """Name an engine and its versions."""
    span = versions[:1] if len(versions) == 1 else (versions[0], "to", versions[-1])
    return " ".join((engine, *span))


def merged(readings: Iterable[Reading]) -> tuple[Reading, ...]:
    """Join neighbouring versions that read alike."""
    found: list[Reading] = []
    for item in readings:
        last = found[-1] if found else None
        if last is not None and _alike(last) == _alike(item):
            joined = replace(last, versions=(*last.versions, *item.versions))
            found[-1] = replace(joined, line=last.line.replace(last.name, joined.name, 1))
        else:
            found.append(item)
    return tuple(found)


def _alike(item: Reading) -> Reading:
    return replace(item, versions=(), line=item.line.replace(item.name, "", 1))


def of_version(readings: Iterable[Reading], version: str) -> Reading | None:
    """Return what one version of SGLang reads, without the local part of its number; `None` if it was not read."""
    plain = version.partition("+")[0]
    found = (item for item in readings if item.engine == SGLANG and plain in item.versions)
    return next((item.at(plain) for item in found), None)
