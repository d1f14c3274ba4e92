"""The report of a search as text, and its tables in terminals; test_page_in_browser looks at it."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from indexcache_search.console import bar
from indexcache_search.report.search import render
from indexcache_search.report.search.figures import changes_figure
from indexcache_search.results import tables
from tests.search.made_results import estimate, row, sample_content, sample_metrics


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


@pytest.mark.parametrize("width", [60, 300])
def test_servers_have_no_columns_of_patterns_and_losses_without_answers_no_accuracy(width: int) -> None:
    metrics = sample_content()
    metrics["held_out"]["answer_sources"] = []
    metrics["held_out"]["rows"] = [
        row("baseline", None, None, None, 0.0, "baseline"),
        row("http://127.0.0.1:30000", None, None, None, 0.003),
    ]
    found = tables.terminal_tables(sample_metrics(metrics).held_out, width)
    console = Console(width=width, file=io.StringIO())
    console.print(*found)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "increase" in text and not any(word in text for word in ("kept", "┃ F ┃", "accuracy"))
    assert len({len(line) for line in text.splitlines() if line.startswith("│")}) == len(found)


@pytest.mark.parametrize("priced", [False, True])
@pytest.mark.parametrize(("width", "parts"), [(80, 3), (100, 2), (300, 1)])
def test_a_terminal_of_any_width_shows_all_columns(width: int, parts: int, priced: bool) -> None:
    """As the demo's: names of 25 letters, six sources; where one table is too wide there are several."""
    content = sample_content()
    sources = ["demo:text", "demo:kv_end", "demo:chain", "demo:multi", "demo:update", "demo:copy"]
    content["held_out"] |= {"sources": sources, "answer_sources": sources[1:]}
    if priced:
        content["held_out"]["prices"] = {"table": "a", "context": 131072, "words": "a GPU"}
    for line in content["held_out"]["rows"]:
        line |= {"prefill": 0.37} if priced else {}
        measured = next(iter(line["by_source"].values())) | {"accuracy": estimate(0.25)}
        line["by_source"] = dict.fromkeys(sources, measured)
        line["name"] = line["name"][:8] + " [/b] and 10 more"
    result = sample_metrics(content)
    console = Console(width=width, file=io.StringIO())
    found = tables.terminal_tables(result.held_out, width)
    console.print(*found, sep="\n")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(found) == parts and max(map(len, lines)) <= width
    titles = [line for line in lines if line.startswith("┃") and "pattern" in line]
    assert len(titles) == len(found) and all("kept" in line for line in titles)
    words = " ".join(titles).replace("┃", " ").split()
    shown = [
        "F",
        *(["128K"] if priced else []),
        "loss",
        "increase",
        *(source.removeprefix("demo:") for source in sources),
    ]
    assert [word for word in words if word not in ("pattern", "kept")] == shown
    assert all("…" not in line for line in lines)
    assert any("2.70x" in line for line in lines) == priced
    said = "128K: prefill speed for as many tokens, by the times of a GPU" if priced else ""
    assert tables.speed_line(result.held_out) == said and said in render(result)
    named = [row for row in result.held_out.rows if row.kind != "phase"]
    assert sum("[/b] and 10 more" in line for line in lines) == len(found) * len(named)


def test_a_bar_says_what_is_left_where_the_end_is_known() -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    with bar(console) as progress:
        progress.add_task("[/b] without an end", total=None)
    assert "[/b] without an end" in console.file.getvalue()  # type: ignore[attr-defined]
