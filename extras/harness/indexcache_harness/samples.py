"""What lm-eval writes with `--log_samples`: a file of lines for each task, a line for each document and filter."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from indexcache_search.data.formats import records
from indexcache_search.errors import DataError, RowError
from sglang_indexcache.io.errors import one_line
from sglang_indexcache.io.fields import Count

_FILE = re.compile(r"samples_(?P<task>.+)_\d{4}-\d\d-\d\dT[\d.-]+\.jsonl")


@dataclass(frozen=True, order=True)
class Score:
    """What is scored: a task's metric, behind one of its filters."""

    task: str
    metric: str
    filter: str

    def __str__(self) -> str:
        return f"{self.task} {self.metric}" + ("" if self.filter == "none" else f" ({self.filter})")


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    doc_id: Count
    filter: str = "none"
    metrics: list[str]
    doc_hash: str = Field(max_length=200)
    prompt_hash: str = Field(max_length=200)

    def scores(self) -> Iterator[tuple[str, float]]:
        """Yield the metrics that are one number; others, such as sums for perplexities, are lm-eval's to add up.

        RULER's tasks have a metric for each length of prompts, which is -1 for documents of other lengths.
        """
        for metric in self.metrics:
            value = (self.model_extra or {}).get(metric)
            if not isinstance(value, bool | int | float) or not math.isfinite(value):
                continue
            if not (metric.isdecimal() and value == -1):
                yield metric, float(value)


class _Results(BaseModel):
    higher_is_better: dict[str, dict[str, bool | None]]


Document = tuple[int, str, str]
"""Number of a document in its task, and digests of it and of its prompt."""
Samples = Mapping[Score, Mapping[Document, float]]


def read_samples(folder: Path) -> Samples:
    """Read all files of samples below a folder.

    Raises:
        DataError: if there is none, or one can't be understood.
    """
    found: dict[Score, dict[Document, float]] = {}
    files = sorted(path for path in folder.rglob("samples_*.jsonl") if _FILE.fullmatch(path.name))
    for path in files:
        named = _FILE.fullmatch(path.name)
        assert named is not None
        for place, record in records(path):
            line = _parsed(place, record)
            for metric, value in line.scores():
                scores = found.setdefault(Score(named["task"], metric, line.filter), {})
                document = (line.doc_id, line.doc_hash, line.prompt_hash)
                if document in scores:
                    raise DataError(f"{place}: document {line.doc_id} stands there twice")
                scores[document] = value
    if not found:
        raise DataError(f"{folder}: lm-eval left no scores of documents; expected samples_TASK_DATE.jsonl")
    return found


def _parsed(place: str, record: Any) -> _Line:
    if isinstance(record, RowError):
        raise DataError(f"{place}: {record}")
    try:
        return _Line.model_validate(record)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{place}: {one_line(where, 60)}: {first['msg']}; expected what lm-eval writes") from None


def paired(baseline: Samples, other: Samples, name: str) -> Iterator[tuple[Score, list[float], list[float]]]:
    """Yield the scores of both on the same documents, in the order of documents.

    Raises:
        DataError: if `name`, the other one, answered other documents than the baseline.
    """
    for score in sorted({*baseline, *other}):
        one, two = baseline.get(score, {}), other.get(score, {})
        if one.keys() != two.keys():
            raise DataError(
                f"{name}: {score}: answered {len(two)} documents, the baseline {len(one)}; expected the same"
            )
        order = sorted(one)
        yield score, [one[document] for document in order], [two[document] for document in order]


def lower_is_better(folder: Path) -> set[tuple[str, str]]:
    """Return the tasks' metrics of which lm-eval says that lower is better.

    Raises:
        DataError: if there is no file of results, or one can't be understood.
    """
    found: set[tuple[str, str]] = set()
    files = sorted(folder.rglob("results_*.json"))
    for path in files:
        try:
            results = _Results.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise DataError(f"{path}: {first['msg']}; expected what lm-eval writes") from None
        found |= {
            (task, metric)
            for task, metrics in results.higher_is_better.items()
            for metric, higher in metrics.items()
            if higher is False
        }
    if not files:
        raise DataError(f"{folder}: lm-eval left no results; expected results_DATE.json")
    return found
