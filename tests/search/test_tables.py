"""Tables of results in terminals of any width, and bars."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from indexcache_search.console import bar
from indexcache_search.results import tables
from tests.search.made_results import estimate, row, sample_content, sample_metrics


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
    assert tables.speed_line(result.held_out) == said
    named = [row for row in result.held_out.rows if row.kind != "phase"]
    assert sum("[/b] and 10 more" in line for line in lines) == len(found) * len(named)


def test_a_bar_says_what_is_left_where_the_end_is_known() -> None:
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    with bar(console) as progress:
        progress.add_task("[/b] without an end", total=None)
    assert "[/b] without an end" in console.file.getvalue()  # type: ignore[attr-defined]
