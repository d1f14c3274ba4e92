"""Small groups of settings as one option: `NAME:KEY=VALUE,...`, or a mapping in a configuration file."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from indexcache_search.cli.bounded import Bounds
from sglang_indexcache.io.errors import IndexCacheError

Group = TypeVar("Group")


def group(kind: type[Group]) -> Callable[[Any], Group]:
    """Make the parser of an option whose settings are the fields of the frozen dataclass `kind`.

    The first field may stand without its key, before a colon. A tuple's values are separated by `/`, there by commas.
    """
    return lambda value: value if isinstance(value, kind) else build(kind, split(value, next(iter(_known(kind)))))


def hint_for(function: Any, flag: str) -> str:
    """Name the option of a command's function that has a setting of this name; empty if none has."""
    setting = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    for name, hint in get_type_hints(function).items():
        for kind in filter(is_dataclass, get_args(hint)):
            if setting in (kind.settable() if hasattr(kind, "settable") else _known(kind)):
                return f"expected --{name.replace('_', '-')} {setting}=VALUE"
    return ""


def split(value: Any, first: str) -> dict[str, Any]:
    """Return the settings of an option's text or mapping, by key; `first` is the one that may stand alone.

    Raises:
        typer.BadParameter: if the text has another form.
    """
    if isinstance(value, Mapping):
        return {str(key).replace("-", "_"): item for key, item in value.items()}
    return _settings(str(value), first)


def _known(kind: Any) -> dict[str, Any]:
    return {field.name: field for field in fields(kind)}


def build(kind: Any, found: Mapping[str, Any]) -> Any:
    """Return the frozen dataclass `kind` with settings that `split` returned.

    Raises:
        typer.BadParameter: naming the setting that is unknown, missing or refused.
    """
    hints, known = get_type_hints(kind, include_extras=True), _known(kind)
    for key in found:
        if key not in known:
            raise typer.BadParameter(f"found {key[:60]!r}, expected {', '.join(known)}")
    missing = [key for key, field in known.items() if field.default is MISSING and key not in found]
    if missing:
        raise typer.BadParameter(f"{missing[0]} is missing")
    given = {}
    try:
        for key, item in found.items():
            given[key] = _convert(hints[key], item)
        return kind(**given)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{key}: {error.message}") from None
    except IndexCacheError as error:
        raise typer.BadParameter(str(error)) from None


def _settings(text: str, first: str) -> dict[str, str]:
    """Split an option's text into the texts of its settings, by key."""
    before, equals, _ = text.partition("=")
    alone, colon, _ = before.rpartition(":") if equals else (before, "", "")
    found = {first: alone.replace(",", "/")} if alone or not equals else {}
    for word in text[len(alone + colon) :].split(",") if equals else ():
        key, equals, value = (part.strip() for part in word.partition("="))
        key = key.replace("-", "_")
        if not equals:
            raise typer.BadParameter(f"found {word[:60]!r}, expected KEY=VALUE")
        if key in found:
            raise typer.BadParameter(f"{key} is given twice")
        found[key] = value
    return found


def _convert(hint: Any, value: Any) -> Any:
    """Convert `value`, from a command line or a configuration file, to the type `hint`."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next(item for item in inner if isinstance(item, Bounds)).check(_convert(inner[0], value))
    if origin in (Union, types.UnionType):
        return _convert(next(item for item in inner if item is not type(None)), value)
    if origin is tuple:
        values = value if isinstance(value, list) else str(value).split("/")
        return tuple(_convert(inner[0], item.strip() if isinstance(item, str) else item) for item in values)
    if hint is bool:
        found = value if isinstance(value, bool) else {"yes": True, "no": False}.get(str(value))
        return _refuse(value, "yes or no") if found is None else found
    if isinstance(value, list | Mapping | bool) or value is None or value == "":
        _refuse(value, "one value")
    if hint in (int, float):
        try:
            return hint(str(value))
        except ValueError:
            _refuse(value, "a whole number" if hint is int else "a number")
    if origin is Literal and value not in inner:
        _refuse(value, f"one of {', '.join(inner)}")
    return Path(str(value)) if hint is Path else hint.parse(str(value)) if hasattr(hint, "parse") else str(value)


def _refuse(value: Any, expected: str) -> Any:
    raise typer.BadParameter(f"found {str(value)[:60]!r}, expected {expected}")
