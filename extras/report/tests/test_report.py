"""The report of a search as text; test_page_in_browser looks at it."""

from __future__ import annotations

import io
import re

from rich.console import Console

from indexcache_report.comparison import changes_figure
from indexcache_report.search import render
from indexcache_search.results import tables
from tests.search.made_results import estimate, priced_content, row, sample_content, sample_metrics


def test_the_page_stands_alone_and_shows_everything() -> None:
    page = render(sample_metrics())
    assert page.count("<svg") == 3 + 1 + 2  # loss over speed, of all and of each source; steps; a heat map a retention
    assert "@import" not in page and not re.search(r'(?:src|href)="(?!#|data:)', page)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    for text in (
        "Loss beside speed",
        "Loss per step",
        "Overlap of choices",
        "28 patterns",
        "12.3 % of them",
        "+0.0500 <small>±0.0100</small>",
        "FSSFSSSS keeps other layers",
    ):
        assert text in page
    assert "uniform phase 1" not in page  # the table has the paper's phase, and the mean of all


def test_names_cannot_inject_markup() -> None:
    page = render(sample_metrics(sample_content("<script>alert(1)</script>")))
    assert "<script>alert" not in page and "&lt;script&gt;" in page


def test_a_strategy_without_steps_has_no_loss_figure() -> None:
    assert "Loss per step" not in render(sample_metrics({**sample_content(), "steps": []}))


def test_a_search_that_keeps_everything_has_a_report() -> None:
    """`--retain 1`: the pattern found is the baseline's, at the baseline's retention."""
    metrics = sample_content()
    metrics["held_out"]["rows"] = [
        row("baseline", "1", 8, "F" * 8, 0.0, "baseline"),
        row("lazy", "1", 8, "F" * 8, 0.0),
        row("uniform phase 0", "1", 8, "F" * 8, 0.0, "phase", 0),
    ]
    metrics["steps"], metrics["pattern_file"]["search"]["strategy"] = [], "lazy"
    assert "lazy" in render(sample_metrics(metrics))


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    metrics = sample_content()
    metrics["held_out"]["sources"] = ["[red]x[bold].jsonl", r"$\frac$.jsonl"]
    for line in metrics["held_out"]["rows"]:
        line["name"] = line["name"].replace("similarity", r"$\frac$ [/b]")
        line["by_source"] = dict(zip(metrics["held_out"]["sources"], line["by_source"].values(), strict=True))
        for source in line["by_source"].values():
            source["accuracy_change"] = estimate(0.1)
    metrics["held_out"]["answer_sources"] = []
    result = sample_metrics(metrics)
    assert r"$\frac$ [/b]" in render(result)
    assert "<svg" in changes_figure(result.held_out)
    console = Console(width=300, file=io.StringIO())
    console.print(*tables.terminal_tables(result.held_out, 300))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert r"$\frac$ [/b]" in text and "[red]x[bold].jsonl" in text


def test_the_page_says_whose_speeds_the_tables_have() -> None:
    found = sample_metrics(priced_content())
    assert tables.speed_line(found.held_out) in render(found)
    assert tables.speed_line(sample_metrics().held_out) == ""
