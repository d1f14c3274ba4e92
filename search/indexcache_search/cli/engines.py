"""`--engine NAME:KEY=VALUE,...`: an engine of the registry, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import typer

from indexcache_search.cli.command import option
from indexcache_search.cli.config import SETTINGS
from indexcache_search.cli.groups import build, split
from indexcache_search.engines.registry import EngineKind, kinds
from indexcache_search.engines.settings import RunSettings

DEFAULT = next(kind for kind in kinds() if kind.name == RunSettings.engine)


@dataclass(frozen=True)
class EngineChoice:
    """An engine, and the settings of its own that were given."""

    kind: EngineKind = DEFAULT
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def settable(cls) -> set[str]:
        """Return the names of all engines' settings."""
        return {name for kind in kinds() for name in _settings(kind)}

    def run(self, defaults: Mapping[str, Any], **settings: Any) -> RunSettings:
        """Return how a model runs: `settings`, with the engine's own; `defaults` stand for those not given."""
        own = {key: value for key, value in defaults.items() if key in _settings(self.kind)} | dict(self.given)
        return RunSettings(engine=self.kind.name, own=own, **settings)


def engine_option(help: str, *, servers: bool = False) -> Any:
    """Make `--engine`; with `servers`, also of engines that run on servers."""
    known: dict[str, EngineKind] = {}
    for kind in kinds():
        if servers or not kind.on_servers:
            known.setdefault(kind.name, kind)
    first = "NAME" if len(known) > 1 else DEFAULT.name
    return option(help, parser=_parser(known), metavar=f"{first}:{SETTINGS}")


def _parser(known: Mapping[str, EngineKind]) -> Callable[[Any], EngineChoice]:
    def parse(value: Any) -> EngineChoice:
        if isinstance(value, EngineChoice):
            return value
        words = split(value, "name")
        name = str(words.pop("name", DEFAULT.name))
        if name not in known:
            raise typer.BadParameter(f"name: found {name[:60]!r}, expected one of {', '.join(known)}")
        for key in words.keys() - set(_settings(known[name])):
            others = [other.name for other in known.values() if key in _settings(other)]
            if others:
                raise typer.BadParameter(f"{key} needs {others[0]}")
            raise typer.BadParameter(f"found {key[:60]!r}, expected {', '.join(('name', *_settings(known[name])))}")
        chosen = build(known[name].settings, words)
        return EngineChoice(known[name], {key: value for key, value in vars(chosen).items() if value is not None})

    return parse


def _settings(kind: EngineKind) -> list[str]:
    return [item.name for item in fields(kind.settings)]
