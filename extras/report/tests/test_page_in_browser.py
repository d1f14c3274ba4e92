"""The pages of a search and of a comparison as a reader has them: in Chromium, by what is visible."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from indexcache_report import comparison
from indexcache_report.search import render
from tests.search.made_results import priced_content, sample_comparison, sample_content, sample_metrics

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESKTOP, PHONE = 1280, 360
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
MARKS = "#frontier [role=option]"
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of this machine; without it or playwright these tests are skipped, unless they are required."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if CHROMIUM is None or sync_playwright is None:
        missing = "no Chromium" if CHROMIUM is None else "no playwright"
        assert "INDEXCACHE_REQUIRE_BROWSER" not in os.environ, f"{missing} on this machine"
        pytest.skip(f"{missing} on this machine")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


def of_six_sources() -> dict[str, Any]:
    """As many as the demo's."""
    content, names = priced_content(), ("text", "kv_end", "chain", "multi", "update", "copy")
    for line in content["held_out"]["rows"]:
        source = next(iter(line["by_source"].values()))
        line["by_source"] = {name: deepcopy(source) for name in names}
    content["held_out"]["sources"] = list(names)
    return content


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages."""
    folder = tmp_path_factory.mktemp("pages")
    pages = {
        "report": render(sample_metrics(priced_content())),
        "eval": comparison.render(sample_comparison()),
        "without times": render(sample_metrics(sample_content())),
        "many sources": render(sample_metrics(of_six_sources())),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Open]:
    """A page by its name; that it asked for no other file, and that no script failed, is checked at the end."""
    contexts, wrong = [], []

    def open_page(name: str = "report", width: int = DESKTOP, scheme: str = "light", script: bool = True) -> Any:
        size = {"width": width, "height": 800}
        context = browser.new_context(
            viewport=size, color_scheme=scheme, java_script_enabled=script, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        address = files[name].as_uri()
        page.on("request", lambda request: request.url.startswith((address, "data:")) or wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def centre(box: dict[str, float]) -> tuple[float, float]:
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def place(page: Any, name: str) -> tuple[float, float]:
    """Where a pattern's mark is on the screen."""
    [box] = [mark.bounding_box() for mark in page.locator(MARKS).all() if name in mark.get_attribute("aria-label")]
    return centre(box)


def said(page: Any) -> str:
    return str(page.locator("#advice").inner_text())


@pytest.mark.parametrize(
    ("width", "script"),
    [
        (DESKTOP, True),
        (PHONE, False),
        pytest.param(DESKTOP, False, marks=pytest.mark.slow),
        pytest.param(PHONE, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["report", "eval"])
def test_the_pattern_to_take_and_why_are_on_the_first_screen(opened: Open, name: str, width: int, script: bool) -> None:
    page = opened(name, width, script=script)
    title = page.get_by_role("heading", name="Take this one: greedy 1/2")
    assert title.is_visible() and title.bounding_box()["y"] < 500
    assert page.get_by_role("img", name="8 layers: FFSSFSFS").first.is_visible()
    for words in (
        "it is the fastest that loses at most 0.1 nats",
        "The next faster, greedy 1/4",
        "loses 0.150 on kv_end",
    ):
        assert words in " ".join(said(page).split())
    note = page.locator("#whose")
    assert note.is_visible() and "estimates, not measurements of this model" in note.inner_text()
    assert "NVIDIA H100" in note.inner_text()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["report", "eval", "many sources"])
def test_the_widest_table_fits_a_desktop_and_scrolls_alone_on_a_phone(opened: Open, name: str, scheme: str) -> None:
    """Six sources with errors behind them were 1,370 pixels."""
    wide = "[document.documentElement, ...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
    assert not any(opened(name, DESKTOP, scheme).evaluate(wide))
    assert opened(name, PHONE, scheme).evaluate(wide)[0] == 0


def test_without_scripts_nothing_is_there_that_does_nothing(opened: Open) -> None:
    page = opened(script=False)
    assert not page.get_by_label("Length of prompts").is_visible() and not page.locator("#detail").is_visible()
    assert page.get_by_role("table").is_visible() and page.locator("#frontier svg").is_visible()
    assert page.locator("li", has_text="similarity 1/4").first.is_visible()


def test_the_loss_that_is_accepted_changes_the_advice(opened: Open) -> None:
    page = opened()

    def limit() -> tuple[float, float]:
        """Height of the line in the figure, and of the band below it."""
        top = page.locator("#frontier svg").bounding_box()["y"]
        line, band = page.locator("#frontier-limit").bounding_box(), page.locator("#frontier-band path").bounding_box()
        return line["y"] - top, band["height"]

    line, band = limit()
    page.get_by_label("Loss that you accept").select_option("0.2 nats (18 % less likely)")
    assert "Take this one: greedy 1/4" in said(page) and "pattern.yaml@1/4" in said(page)
    assert limit()[0] < line and limit()[1] > band
    assert "within the limit" in page.locator("li", has_text="greedy 1/4").last.inner_text()
    page.get_by_label("Loss that you accept").select_option("0.01 nats (1 % less likely)")
    assert "Take none of these" in said(page) and limit()[0] > line
    assert page.locator("svg .pick").count() == 0


def test_the_band_ends_where_the_limit_is(opened: Open) -> None:
    page = opened()
    for choice in range(6):
        page.get_by_label("Loss that you accept").select_option(str(choice))
        for name in ("frontier", "source-0", "source-1"):
            top = page.locator(f"#{name}-band path").bounding_box()["y"]
            _, middle = centre(page.locator(f"#{name}-limit path").bounding_box())
            assert abs(top - middle) < 2, (choice, name)


def test_shorter_prompts_gain_less(opened: Open) -> None:
    page = opened()
    slider, before = page.get_by_label("Length of prompts"), place(page, "greedy 1/4")
    small = page.locator("#source-0-1-mark").bounding_box()["x"]
    assert slider.get_attribute("aria-valuetext") == "128K tokens" and "128K tokens" in said(page)
    speed = page.locator("b[data-speed]").first.inner_text()
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext") == "64K tokens" == page.locator("output").inner_text()
    assert "64K tokens" in said(page)
    page.keyboard.press("Home")
    assert "16K tokens" in said(page) and "128K" not in said(page)
    after = place(page, "greedy 1/4")
    assert after[0] < before[0] - 20 and abs(after[1] - before[1]) < 1
    assert page.locator("#source-0-1-mark").bounding_box()["x"] < small
    assert float(page.locator("b[data-speed]").first.inner_text().rstrip("x")) < float(speed.rstrip("x"))
    assert place(page, "baseline") == pytest.approx(place(opened(), "baseline"), abs=0.1)


def test_pointing_at_a_mark_shows_its_values(opened: Open) -> None:
    page = opened()
    detail = page.locator("#detail")
    assert "greedy 1/2" in detail.inner_text()
    page.locator("#frontier svg").scroll_into_view_if_needed()
    page.mouse.move(*place(page, "greedy 1/4"))
    shown = " ".join(detail.inner_text().split())
    assert "greedy 1/4" in shown and "kv_end +0.150 ± 0.040" in shown and "text.jsonl +0.050 ± 0.010" in shown
    assert detail.get_by_role("img", name="8 layers: FSSFSSSS").is_visible()


def test_the_keyboard_reaches_every_mark(opened: Open) -> None:
    page = opened()
    marks = page.locator(MARKS)
    page.get_by_label("Length of prompts").focus()
    page.keyboard.press("Tab")
    seen = []
    for _ in range(marks.count()):
        focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
        seen.append(focused)
        name = page.locator("#detail .name").evaluate("node => node.firstChild.textContent.trim()")
        assert focused.startswith(name.removesuffix(" (as it is)"))
        assert page.locator(f"{MARKS}[aria-selected=true]").get_attribute("aria-label") == focused
        page.keyboard.press("ArrowRight")
    assert len(set(seen)) == marks.count() == 9 and "nats a token on kv_end" in " ".join(seen)
    page.keyboard.press("Tab")  # the marks are one stop
    assert page.evaluate("document.activeElement.getAttribute('role')") != "option"


@pytest.mark.parametrize("name", ["report", "eval", "without times"])
def test_figures_are_drawn_and_a_phone_does_not_scroll_sideways(opened: Open, name: str) -> None:
    for width in (DESKTOP, PHONE):
        page = opened(name, width)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for figure in page.locator("svg").all():
            box = figure.bounding_box()
            assert box["width"] > 120 and box["height"] > 90
        frame = page.locator("#frontier svg").bounding_box()
        marks = [mark.bounding_box() for mark in page.locator(MARKS).all()]
        assert len(marks) == 9
        for box in marks:
            x, y = centre(box)
            assert 0 < x - frame["x"] < frame["width"] and 0 < y - frame["y"] < frame["height"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_scheme(opened: Open, scheme: str) -> None:
    page = opened(scheme=scheme)
    style = "(node) => { const look = getComputedStyle(node); return [look.color, look.backgroundColor, look.fill] }"
    _, paper, _ = page.locator("body").evaluate(style)
    _, _, text = page.locator("#frontier svg text").first.evaluate(style)
    _, _, pick = page.locator("#frontier svg .pick use").evaluate(style)
    expected = {
        "light": ("rgb(255, 255, 255)", "rgb(27, 31, 36)", "rgb(26, 127, 55)"),
        "dark": ("rgb(15, 19, 24)", "rgb(232, 236, 241)", "rgb(87, 194, 107)"),
    }
    assert (paper, text, pick) == expected[scheme]


AT_ONCE = [("report", "light", DESKTOP), ("report", "dark", PHONE), ("eval", "dark", PHONE)]


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        *AT_ONCE,
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(["report", "eval", "without times"], ["light", "dark"], [DESKTOP, PHONE])
            if case not in AT_ONCE
        ),
    ],
)
def test_the_checker_of_accessibility_finds_nothing(opened: Open, name: str, scheme: str, width: int) -> None:
    page = opened(name, width, scheme)
    page.locator("summary").first.click() if page.locator("summary").count() else None
    assert violations(page) == []


def test_the_checker_would_find_something(opened: Open) -> None:
    page = opened()
    page.evaluate("document.querySelector('main').innerHTML += '<img src=\"data:,\"><p style=\"color: #eee\">pale</p>'")
    assert set(violations(page)) >= {"image-alt", "color-contrast"}


def violations(page: Any) -> list[str]:
    """Run axe, and return the rules that the page breaks."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response
    assert len(found["passes"]) > 15 and not any(rule["id"] == "color-contrast" for rule in found["inapplicable"]), (
        "axe looked at nothing"
    )
    return [rule["id"] for rule in found["violations"]]
