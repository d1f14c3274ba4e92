"""The entry point: what is imported before results are there is quick, matplotlib takes a second."""

from __future__ import annotations

from collections.abc import Mapping

from indexcache_search.results.pages import Pages
from indexcache_search.results.schema import ComparisonResult, SearchResult
from sglang_indexcache.pattern_file.result_folder import CARD, REPORT


def _search(result: SearchResult, base_model: str | None) -> Mapping[str, str]:
    from indexcache_report import card, search

    return {REPORT: search.render(result, base_model or "MODEL"), CARD: card.render(result, base_model)}


def _suffix(result: SearchResult) -> str:
    from indexcache_report import card

    return card.suffix(result)


def _comparison(result: ComparisonResult, figures: Mapping[str, str]) -> str:
    from indexcache_report import comparison

    return comparison.render(result, figures)


HTML = Pages(search=_search, suffix=_suffix, comparison=_comparison)
