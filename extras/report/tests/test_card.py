"""The model card of a search: README.md of its folder."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from indexcache_report.card import render
from indexcache_search.results.variant import IN_TIME
from indexcache_search.searching.job import Files
from indexcache_search.searching.show import show
from tests.search.made_results import row, sample_content, sample_metrics
from tests.search.test_published import front_matter


def test_a_model_of_the_hub_is_the_base_model() -> None:
    card = render(sample_metrics(), "zai-org/GLM-5-FP8")
    assert front_matter(card)["base_model"] == "zai-org/GLM-5-FP8"
    assert "indexcache-check FOLDER/pattern.yaml@1/2 --model zai-org/GLM-5-FP8\n" in card
    assert "No speed was measured or reckoned here.\n" in card and "command" not in card
    content = sample_content()
    content["held_out"]["prices"] = {"table": "glm-5-tp8", "context": 131072, "words": "eight H100"}
    content["held_out"]["rows"][1]["prefill"] = 0.5
    card = render(sample_metrics(content), "zai-org/GLM-5-FP8")
    assert "128K: prefill speed for as many tokens, by the times of eight H100.\n" in card and "| 2.00x |" in card


def test_a_pattern_found_for_a_time_is_told_apart() -> None:
    content = sample_content()
    content["pattern_file"]["search"]["prefill"] = {"share": 0.4, "context": 131072, "prices": "glm-5-tp8"}
    content["held_out"]["rows"].append(row(f"greedy{IN_TIME}", None, 4, "FFSSFSFS", 0.05))
    card = render(sample_metrics(content), None)
    assert "| in time | 4 of 8 F | `FFSSFSFS` |" in card
    assert "the file serves the pattern found for prompts of 131072 tokens in 0.4 of the time\n" in card


@pytest.mark.parametrize(("increase", "taken"), [(0.05, "1/4"), (2.0, "1/2")])
def test_the_commands_of_a_card_and_of_the_terminal_take_what_the_page_says_to_take(
    increase: float, taken: str
) -> None:
    content = sample_content()
    baseline, first, *others = content["held_out"]["rows"]
    last = next(item for item in others if item["name"] == "greedy")
    assert (first["retention"], last["retention"]) == ("1/2", "1/4")
    for source in last["by_source"].values():
        source["increase"]["mean"] = increase
    content["held_out"]["rows"] = [baseline, first, last]
    result, files = sample_metrics(content), Files(folder=Path("out"), work_dir=Path("work"), restart=False)
    assert f"launch_server --indexcache-pattern FOLDER/pattern.yaml@{taken} " in render(result, None)
    console = Console(width=200, file=io.StringIO())
    show(result, "org/glm", files, console)
    _, said = console.file.getvalue().split("Next: ")  # type: ignore[attr-defined]
    page, judges, checks, serves = said.splitlines()
    assert page == "read out/report.html in a browser"
    command, named, why = judges.strip().partition(" with the same --model")
    assert command == f"indexcache-eval --pattern out/pattern.yaml@{taken} --tasks multi_key,variable_tracking,mrcr"
    assert named and why == ": what a search has not seen it may break"
    assert checks.strip() == f"indexcache-check out/pattern.yaml@{taken} --model org/glm"
    assert serves.endswith(f"launch_server --indexcache-pattern out/pattern.yaml@{taken} --model-path org/glm")
    console = Console(width=200, file=io.StringIO())
    show(result, None, files, console)  # the demo
    # 1/8, a default there, is not in it
    line = (
        "Next: read out/report.html in a browser\n      indexcache-eval --pattern out/pattern.yaml --retain 1/2,1/4\n"
    )
    assert console.file.getvalue().endswith(line)  # type: ignore[attr-defined]


def test_tables_of_a_card_are_whole() -> None:
    lines = render(sample_metrics(), None).splitlines()
    for number, line in enumerate(lines):
        if re.fullmatch(r"\|( --:? \|)+", line):
            assert lines[number - 2] == "" and lines[number - 1].count("|") == line.count("|"), line
            assert lines[number + 1].count("|") == line.count("|"), line


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a | b\n# Title", "`code` & more", "{{ 7 * 7 }}"])
def test_names_cannot_inject_markup(name: str) -> None:
    content = sample_content(name)
    content["held_out"]["sources"] = content["pattern_file"]["calibration"]["sources"] = [name, "demo:kv_end"]
    for item in content["held_out"]["rows"]:
        item["by_source"][name] = item["by_source"].pop("text.jsonl")
    card = render(sample_metrics(content), None)
    prose = "\n".join(line for line in card.splitlines() if not line.startswith("    "))  # code is shown as it is
    assert "\n# Title" not in card and not any(text in prose for text in ("<script", "a | b", "`code`"))
    assert "49" not in re.sub(r"[0-9a-f]{64}", "", card) and front_matter(card)["tags"]
