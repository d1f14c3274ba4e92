"""`--config run.yaml`: option values from a file that can be kept beside the results; flags take precedence.

In texts, `~` at the beginning and variables (`$NAME`, `${NAME}`) are written out as in a shell; `$$` is a dollar sign.
One file can serve several commands: what stands in a section with a command's name is that command's alone, what stands
outside is everybody's.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from indexcache_search.cli.groups import hint_for
from indexcache_search.errors import SearchError
from sglang_indexcache.io import strict_yaml
from sglang_indexcache.io.atomic import read_regular
from sglang_indexcache.io.errors import IndexCacheError

SETTINGS, LIST = "KEY=VALUE,...", ",..."  # metavars of options that take a mapping, or a list as one word
_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([^}]*)\}?)")
SERVER = "server"  # key in `context.meta` for flags that are passed on to the server


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use a file's values for options that are not given; the callback of `--config`.

    Raises:
        typer.BadParameter: naming the file, the key and the error.
    """
    if path is None:
        return None
    try:
        content = strict_yaml.load(read_regular(path, strict_yaml.MAX_BYTES))
    except IndexCacheError as error:
        raise typer.BadParameter(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path}: expected a mapping of option names")
    options = {option.name: option for option in context.command.params if not option.is_eager}
    found = context.default_map = {}
    for key, given in _own(content, str(context.info_name), path).items():
        name = key.replace("-", "_")
        try:
            if name in found:
                raise typer.BadParameter("is given twice")
            value = _written_out(given)
            if value == "" and name in paths(context.command.callback):
                raise typer.BadParameter("is empty, expected a path")
            if name in options:
                found[name] = _given(options[name], value)
                options[name].process_value(context, found[name])
            elif context.ignore_unknown_options:
                context.meta.setdefault(SERVER, []).extend(_server_flag(name, value))
            else:
                raise typer.BadParameter(f"no such option of {context.info_name}")
        except typer.BadParameter as error:
            raise typer.BadParameter(f"{path}: {key}: {error.message}") from None
    return path


def paths(function: Any) -> set[str]:
    """Return the options of a command's function that are paths: an empty one would be the folder that one is in."""
    return {name for name, kind in get_type_hints(function).items() if Path in (kind, *get_args(kind))}


@cache
def sections() -> tuple[str, ...]:
    """Return the names that sections may have: those in the group `indexcache.commands`, after `indexcache-`."""
    return tuple(sorted(entry_points(group="indexcache.commands").names))


def _own(content: dict[str, Any], command: str, path: Path) -> dict[str, Any]:
    """Return what a file has for a command, of its section and outside of all.

    Raises:
        typer.BadParameter: if a section is no mapping, or has a key that stands outside, too.
    """
    own = {key: value for key, value in content.items() if key not in sections()}
    for section in sections():
        found = content.get(section, {})
        if not isinstance(found, dict):
            raise typer.BadParameter(f"{path}: {section}: expected a mapping of option names")
        if command.removeprefix("indexcache-") == section:
            for key in found.keys() & own.keys():
                raise typer.BadParameter(f"{path}: {section}: {key} stands outside of the section, too")
            own |= found
    return own


def server_flags(context: typer.Context, taken: bool) -> tuple[str, ...]:
    """Return the unknown flags of the file and of the command line, which go to a server.

    Raises:
        SearchError: if there are any, and no server takes them.
    """
    of_file = context.meta.get(SERVER, [])
    for where, words in ((f"{context.params['config']}: ", of_file), ("", context.args)):
        if words and not taken:
            flag = words[0].partition("=")[0]
            hint = hint_for(context.command.callback, flag) or (
                f"see {context.info_name} --help-all; a flag of SGLang's server is taken with --engine sglang, without"
                " --endpoint"
            )
            raise SearchError(f"{where}no such option: {flag}; {hint}")
    return (*of_file, *context.args)


def _written_out(value: Any) -> Any:
    """Replace `~` and variables in the texts of a value; one that is not set would make a path of another meaning.

    Raises:
        typer.BadParameter: naming the variable.
    """
    if isinstance(value, dict):
        return {key: _written_out(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_written_out(item) for item in value]
    if not isinstance(value, str):
        return value

    def written_out(match: re.Match[str]) -> str:
        name = match[2] or match[3]
        if match[1]:
            return "$"
        if not re.fullmatch(r"[A-Za-z_]\w*", name or "") or match[0][1:] not in (name, f"{{{name}}}"):
            raise typer.BadParameter(f"found {match[0][:40]!r}, expected one like ${{HOME}}, or $$ for a dollar sign")
        if not os.environ.get(name):
            raise typer.BadParameter(f"the variable {name} is not set, or empty; $$ stands for a dollar sign")
        return os.environ[name]

    text = _VARIABLE.sub(written_out, value)
    if not value.startswith("~"):
        return text
    home, *rest = text.split("/", 1)
    try:
        return "/".join([str(Path(home).expanduser()), *rest])
    except RuntimeError:
        raise typer.BadParameter(f"found {value[:40]!r}, and there is no such home folder") from None


def _given(option: Any, value: Any) -> Any:
    """Convert `value` to words as on a command line; switches and mappings stay as they are."""
    metavar = option.metavar or ""
    if option.is_flag:
        return value if isinstance(value, bool) else _refuse(value, "true or false")
    if isinstance(value, dict) and metavar.endswith(SETTINGS):
        return value
    if option.multiple:
        return [_word(item) for item in (value if isinstance(value, list) else [value])]
    return ",".join(map(_word, value)) if isinstance(value, list) and LIST in metavar else _word(value)


def _server_flag(name: str, value: Any) -> list[str]:
    words = value if isinstance(value, list) else [] if value is True else [value]
    return [f"--{name.replace('_', '-')}", *map(_word, words)]


def _word(value: Any) -> str:
    return _refuse(value, "a text or a number") if isinstance(value, bool | list | dict | None) else str(value)


def _refuse(value: Any, expected: str) -> Any:
    raise typer.BadParameter(f"found {json.dumps(value, ensure_ascii=False)[:60]}, expected {expected}")
