"""The files of a finished search."""

from __future__ import annotations

import json

from indexcache_search.results.held_out import SearchResult
from indexcache_search.searching import model_card
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern_file.result_folder import CARD, METRICS, PATTERN, REPORT


def texts(result: SearchResult, model: str) -> dict[str, str]:
    """Return the contents of pattern.yaml, metrics.json, report.html and README.md, by name."""
    from indexcache_search.report.search import render  # matplotlib takes a second to import

    named = ModelName.parse(model)
    return {
        PATTERN: result.pattern_file.dumps(),
        METRICS: json.dumps(result.as_json(), indent=1) + "\n",
        REPORT: render(result),
        CARD: model_card.render(result, named.repository if named.folder is None else None),
    }
