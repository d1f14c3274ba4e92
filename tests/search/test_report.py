"""The HTML report, opened in a real browser."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from indexcache_search.results import tables
from indexcache_search.results.held_out import SearchResult
from indexcache_search.search.progress import Remaining, SearchProgress, bar
from indexcache_search.search.report import render
from indexcache_search.search.report.figures import changes_figure
from tests.conftest import random_tokens

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars --window-size=1100,2600"
).split()


def estimate(mean: float, stderr: float | None = 0.01) -> dict[str, float | None]:
    return {"mean": mean, "stderr": stderr}


def row(
    name: str,
    retention: str,
    full: int,
    pattern: str | None,
    increase: float,
    kind: str = "named",
    phase: int | None = None,
) -> dict[str, Any]:
    measured = {"loss": estimate(2 + increase), "increase": estimate(increase)}
    source = {**measured, "accuracy": estimate(0.9)}
    sources = {"text.jsonl": source, "demo:kv_end": source}
    return {
        "kind": kind,
        "name": name,
        "retention": retention,
        "phase": phase,
        "full_layers": full,
        "pattern": pattern,
        **measured,
        "by_source": sources,
    }


def sample_content(model_name: str = "tiny") -> dict[str, Any]:
    """metrics.json of a made-up search of eight layers."""
    order, pattern, steps = [3, 5, 7, 2, 6, 1, 4], "F" * 8, []
    for number, layer in enumerate(order, 1):
        pattern = pattern[:layer] + "S" + pattern[layer + 1 :]
        loss = 2 + 0.01 * number**2
        steps.append(
            {
                "layer": layer,
                "full_layers": 8 - number,
                "pattern": pattern,
                "loss": loss,
                "increase": estimate(loss - 2, None if number == 1 else 0.02),
                "candidates": {str(layer): loss},
            }
        )
    rows = [row("baseline", "1", 8, "F" * 8, 0.0, "baseline")]
    for retention, full, found in (("1/2", 4, "FFSSFSFS"), ("1/4", 2, "FSSSFSSS")):
        rows += [
            row("greedy", retention, full, found, 0.05),
            row("uniform phase 0", retention, full, "FSFSFSFS", 0.2, "phase", 0),
            row("uniform phase 1", retention, full, "FFSFSFSS", -0.01, "phase", 1),
            row("uniform, mean of 2 phases", retention, full, None, 0.1, "mean"),
            row("similarity", retention, full, "FFFFSSSS", 0.4),
        ]
    return {
        "schema": "indexcache-search/metrics/v3",
        "pattern_file": {
            "schema": "indexcache/v1",
            "retention": 0.5,
            "model": {
                "name": model_name,
                "architecture": "GlmMoeDsaForCausalLM",
                "num_layers": 8,
                "config_sha256": "a" * 64,
                "locked_layers": [],
            },
            "pattern": "FFSSFSFS",
            "search": {
                "strategy": "greedy",
                "objective": "nll",
                "evaluations": 28,
                "seed": 0,
                "baseline_loss": 2.0,
                "loss": 2.05,
                "noise_floor": 0.0,
            },
            "calibration": {
                "sources": ["text.jsonl"],
                "sequences": 4,
                "seq_len": 512,
                "scored_tokens": 1792,
                "sha256": "b" * 64,
            },
            "versions": {"sglang_indexcache": "0.1.0"},
            "created": "2026-11-21",
        },
        "engine": {"name": "transformers 5.23.0", "device": "CPU"},
        "cost": {
            "evaluations": 30,
            "sequences": 77,
            "layer_tokens": 123_000,
            "seconds": 9.5,
            "algorithm_1_layer_tokens": 1_000_000,
            "share_of_algorithm_1": 0.123,
        },
        "seconds": {"search": 12.0},
        "steps": steps,
        "look_alikes": ["1/4: FSSFSSSS keeps other layers than FSSSFSSS"],
        "held_out": {
            "sources": ["text.jsonl", "demo:kv_end"],
            "answer_sources": ["demo:kv_end"],
            "sequences": 12,
            "scored_tokens": 5376,
            "sha256": "c" * 64,
            "rows": rows,
        },
        "overlap": np.clip(1 - 0.1 * np.abs(np.subtract.outer(np.arange(8), np.arange(8))), 0, 1).tolist(),
        "similarity": None,
    }


def sample_metrics(content: dict[str, Any] | None = None) -> SearchResult:
    return SearchResult.model_validate_json(json.dumps(content or sample_content()))


def test_the_page_stands_alone_and_shows_everything() -> None:
    page = render(sample_metrics())
    assert page.count("<svg") == 2 + 2  # comparison, loss, one heat map a retention
    assert "<script" not in page and "@import" not in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    for text in (
        "Held-out comparison",
        "Loss per step",
        "Overlap of choices",
        "FFSSFSFS"[:1],
        "28 patterns",
        "12.3 % of them",
        "+0.0500 ±0.0100",
        "FSSFSSSS keeps other layers",
    ):
        assert text in page
    assert "uniform phase 1" not in page  # single phases are dots in the figure, not rows


def test_names_cannot_inject_markup() -> None:
    page = render(sample_metrics(sample_content("<script>alert(1)</script>")))
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_a_strategy_without_steps_has_no_loss_figure() -> None:
    assert "Loss per step" not in render(sample_metrics({**sample_content(), "steps": []}))


def test_a_real_browser_draws_it(tmp_path: Path) -> None:
    """What would break: a figure that does not render, a page wider than the window, a blank page."""
    if BROWSER is None:
        assert "INDEXCACHE_REQUIRE_BROWSER" not in os.environ, "no Chromium on this machine"
        pytest.skip("no Chromium on this machine")
    page, shot = tmp_path / "report.html", tmp_path / "report.png"
    probe = "<script>document.title = JSON.stringify({wide: document.documentElement.scrollWidth, figures: \
Array.from(document.querySelectorAll('svg')).map(s => s.getBoundingClientRect().height)})</script></body>"
    page.write_text(render(sample_metrics()).replace("</body>", probe))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [BROWSER, *FLAGS, profile]
    subprocess.run([*command, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True, timeout=300)
    dumped = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], check=True, capture_output=True, text=True, timeout=300
    )
    title = re.search(r"<title>(.*?)</title>", dumped.stdout, re.DOTALL)
    assert title is not None
    measured = eval(title.group(1))
    assert measured["wide"] <= 1100
    assert len(measured["figures"]) == 4 and min(measured["figures"]) > 150
    image = matplotlib.image.imread(shot)[..., :3]
    assert image.shape[:2] == (2600, 1100)
    # The heat maps' yellow diagonal, the outlines' red and the bars' blue are really on the screen.
    for colour in ((253, 231, 36), (200, 53, 43), (37, 99, 168)):
        near = np.abs(image * 255 - np.asarray(colour)).max(axis=-1) < 12
        assert near.sum() > 50, colour


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
    said = "128K: speed of a prompt of as many tokens, by the times of a GPU" if priced else ""
    assert tables.speed_line(result.held_out) == said and said in render(result)
    named = [row for row in result.held_out.rows if row.kind != "phase"]
    assert sum("[/b] and 10 more" in line for line in lines) == len(found) * len(named)


def test_a_bar_has_no_end_once_more_is_done_than_was_guessed() -> None:
    data = random_tokens(sequences=2)
    evaluation: Any = SimpleNamespace(rows=(0,))
    with SearchProgress(Console(file=io.StringIO(), force_terminal=True)) as progress:
        progress.begin("a search", None, data)
        [task] = progress._progress.tasks
        progress._progress.update(task.id, total=3)
        for done, total in ((1, 3), (2, 3), (3, 3), (4, None), (5, None)):
            progress.evaluated(evaluation)
            assert (task.completed, task.total) == (done, total)


def test_what_is_left_is_told_where_the_end_is_known() -> None:
    task: Any = SimpleNamespace(finished=False, total=10, time_remaining=50.4)
    assert str(Remaining().render(task)) == "0:00:50 left"
    for change in ({"total": None}, {"finished": True}, {"time_remaining": None}):
        assert str(Remaining().render(SimpleNamespace(**{**vars(task), **change}))) == ""  # type: ignore[arg-type]
    console = Console(width=100, file=io.StringIO(), force_terminal=True)
    with bar(console) as progress:
        progress.add_task("[/b] without an end", total=None)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "left" not in text and "[/b] without an end" in text
