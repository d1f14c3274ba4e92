"""What pages and cards say: of dense models and of those with indexers, of one and of several, of what to take."""

from __future__ import annotations

import re
from typing import Any

import pytest

from extras.report.tests.test_page import frontier, point
from indexcache_report import card as model_card
from indexcache_report import comparison, words
from indexcache_report.frontier import environment, section, spelt
from indexcache_report.search import render
from indexcache_search.errors import SearchError
from tests.search.made_results import estimate, sample_comparison, sample_content, sample_metrics


def dense_content() -> dict[str, Any]:
    """The same search of a dense model, without prices."""
    content = sample_content()
    for line in content["held_out"]["rows"]:
        line["pattern"] = line["pattern"] and line["pattern"].replace("F", "D")
        if line["kind"] == "phase":  # so that what was found is what to take
            lost = {**line["by_source"]["text.jsonl"], "increase": estimate(0.5)}
            line["by_source"] = dict.fromkeys(line["by_source"], lost)
    file = content["pattern_file"]
    file["model"]["architecture"] = "Qwen3ForCausalLM"
    file["selection"] = {"page_tokens": 16, "pages": 64, "recent_pages": 8, "sink_pages": 0, "score": "token_max"}
    file["pattern"] = file["pattern"].replace("F", "D")
    for step in content["steps"]:
        step["pattern"] = step["pattern"].replace("F", "D")
    return content


def test_pages_of_dense_models_speak_of_pages_and_decoding() -> None:
    """They spoke of indexers and faster prompts, credited IndexCache, and left out the flags that serving needs."""
    found = sample_metrics(dense_content())
    card, report = model_card.render(found, "Qwen/Qwen3-8B"), render(found)
    compared = comparison.render(sample_comparison(dense_content()))
    for page in (card, report, compared):
        assert not re.search(r"indexer|prompts are read faster", page), page
    assert "[DELTA](https://arxiv.org/abs/2510.09883)" in card and "DELTA (2510.09883 on arXiv)" in report
    assert "Which layers of tiny need all keys" in report and "decoding gets faster" in report
    flags = "--attention-backend flashinfer --page-size 16"
    assert f"--model-path Qwen/Qwen3-8B {flags}\n" in card
    launch = "python -m sglang_indexcache.launch_server --model-path"
    page = render(found, "Qwen/Qwen3-8B").partition("frontier-data")[0]
    assert re.search(rf"<code>{launch} Qwen/Qwen3-8B --indexcache-pattern pattern.yaml@1/[24] {flags}</code>", page)
    assert f"<code>{launch} MODEL --indexcache-pattern" in report  # a folder's name is nobody else's
    assert (
        "S to those that the D or F before it selected" in report and "fewer layers that attend to everything" in report
    )
    assert "IndexCache</a>" not in report and "2603.12201" not in card + report


def test_pages_of_models_with_indexers_are_as_ever() -> None:
    found = sample_metrics()
    card, report = model_card.render(found, "zai-org/GLM-5"), render(found)
    assert "Which indexers tiny needs" in report and "IndexCache (2603.12201 on arXiv)" in report
    assert "[IndexCache](https://arxiv.org/abs/2603.12201)" in card and "flashinfer" not in card + report


def test_without_an_extension_patterns_of_dense_models_have_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "extensions", lambda group, kind: {})
    assert words.words_of(dense=False) is words.INDEXERS
    with pytest.raises(SearchError, match="need an extension"):
        words.words_of(dense=True)


def test_one_of_something_has_no_plural() -> None:
    content = sample_content()
    content["pattern_file"]["search"]["evaluations"] = content["cost"]["evaluations"] = 1
    content["held_out"]["sequences"] = content["pattern_file"]["calibration"]["sequences"] = 1
    for page in (render(sample_metrics(content)), model_card.render(sample_metrics(content), None)):
        assert not re.search(r"\b1 (patterns|sequences)\b", page) and "1 pattern" in page and "1 sequence" in page
    assert "1 sequence of" in comparison.render(sample_comparison(content))


def test_the_frame_and_the_legend_say_what_the_advice_does() -> None:
    """A green frame stood round `Take none of these`, and a legend of a mark that nothing had."""
    taken, none = point("a", 0.01, 1.5, 0.001), point("b", 0.5, 1.5, 0.001)
    for points, kind, hidden in (
        (frontier(taken), "take", False),
        (frontier(none), "none", True),
        (frontier(point("a", 0.09, 1.5)), "open", False),
        (frontier(point("b", 0.11, 1.5)), "open", True),
    ):
        page = section(points, spelt).partition("frontier-data")[0]
        assert f'<h2 class="{kind}">' in page and ('id="key-pick" hidden' in page) == hidden
        assert "uniform" not in page
    assert "▲</span> uniform" in section(frontier(taken, point("u", 0.2, 1.2, kind="phase")), spelt)
    style = environment().get_template("style.css").render()
    assert ".advice:has(.take) { border-left-color: var(--green)" in style and "has(.none)" not in style
