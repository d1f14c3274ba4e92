"""README.md of a search: a model card, so that the output folder is what one uploads to the hub."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import jinja2
import yaml

from indexcache_report.advice import ALLOWANCE, choose
from indexcache_report.points import estimated
from indexcache_report.words import words_of
from indexcache_search.results import tables
from indexcache_search.results.schema import SearchResult
from indexcache_search.results.words import counted, serving_flags
from sglang_indexcache.io.errors import one_line

TAGS = ("indexcache", "sparse-attention", "sglang")


def render(result: SearchResult, base_model: str | None) -> str:
    """Render the card: what was found, for which model, how, what it loses and gives, and digests of what it is from.

    Args:
        result: the finished search.
        base_model: the model's id on the hub; `None` for a folder.
    """
    held_out, file = result.held_out, result.pattern_file
    search = file.search
    assert search is not None
    found = result.found
    retentions = [f"@{row.retention}" for row in found if row.retention]
    words = words_of(file.selection is not None)
    front_matter: dict[str, Any] = {"tags": list(TAGS)}
    if base_model is not None:
        front_matter = {"base_model": base_model, **front_matter}
    environment = jinja2.Environment(  # noqa: S701 (Markdown; `_plain` escapes what has a meaning there)
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        finalize=_plain,
        keep_trailing_newline=True,
        loader=jinja2.PackageLoader("indexcache_report"),
    )
    environment.filters["counted"] = counted
    return environment.get_template("card.md").render(
        front_matter=_Markdown(yaml.safe_dump(front_matter, sort_keys=False)),
        name=base_model or file.model.name,
        model=_Markdown(one_line(shlex.quote(base_model or file.model.name))),
        result=result.model_copy(update={"command": result.command and _Markdown(one_line(result.command, 4000))}),
        file=file,
        search=search,
        calibration=file.calibration,
        full_role=file.as_pattern().full_role,
        words=words,
        what=_Markdown(words.card.format(_plain(base_model or file.model.name))),
        flags=_Markdown("".join(f" {word}" for word in serving_flags(file.selection))),
        at=suffix(result),
        retentions=_Markdown(" or ".join(f"`{retention}`" for retention in retentions)),
        found=found,
        table=_table([tables.columns(held_out), *(tables.cells(row, held_out) for row in tables.shown_rows(held_out))]),
        speed=tables.speed_line(held_out),
    )


def suffix(result: SearchResult) -> str:
    """Return what is behind the file's name for the pattern that the page says to take, else for the first found."""
    retentions = {row.pattern: row.retention for row in result.found}
    frontier = estimated(result.held_out)
    point = None if frontier is None else choose(frontier, max(frontier.contexts, default=None), ALLOWANCE).point
    if point is not None and point.pattern in retentions:
        retention = retentions[point.pattern]
    else:
        retention = next(filter(None, retentions.values()), None)
    return f"@{retention}" if retention else ""


class _Markdown(str):
    """Text that stands in the card as it is."""


def _table(lines: Sequence[Sequence[str]]) -> _Markdown:
    """Make a table of a line of titles and the lines below it."""
    titles, *rows = [f"| {' | '.join(map(_plain, line))} |" for line in lines]
    return _Markdown("\n".join([titles, f"|{' -- |' * len(lines[0])}", *rows]))


def _plain(value: Any) -> Any:
    """Return a text on one line, without what Markdown or HTML would read as their own."""
    if not isinstance(value, str) or isinstance(value, _Markdown):
        return value
    text = one_line(value)
    for letter, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("`", "'")):
        text = text.replace(letter, escaped)
    return _Markdown(text)
