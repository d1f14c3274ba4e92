"""Pages of results, which an extension makes: without one, results are files and tables alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from indexcache_search.results.schema import ComparisonResult, SearchResult
from sglang_indexcache.io.extensions import extensions

UNWRITTEN = "not written: that needs an extension which is not installed"


@dataclass(frozen=True, kw_only=True)
class Pages:
    """What makes pages, registered as `html` by an entry point of the group `indexcache.reports`.

    Attributes:
        search: returns report.html and README.md, by name, of a search of a model with this hub id, or of a folder.
        suffix: returns what stands behind the name of a search's pattern file, for the pattern that its page advises.
        comparison: returns eval.html, with the SVG texts of a study by their titles.
    """

    search: Callable[[SearchResult, str | None], Mapping[str, str]]
    suffix: Callable[[SearchResult], str]
    comparison: Callable[[ComparisonResult, Mapping[str, str]], str]


def pages() -> Pages | None:
    """Return what makes pages; `None` if no extension does.

    Raises:
        ExtensionError: if an extension can't be loaded.
    """
    found: Pages | None = extensions("reports", Pages).get("html")
    return found
