"""Loss beside speed: which points there are, which one is to be taken, and where they are drawn."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from indexcache_report import comparison
from indexcache_report.advice import ALLOWANCES, choose, less_likely
from indexcache_report.figures import chart
from indexcache_report.frontier import section, spelt
from indexcache_report.points import Frontier, Point, Speed, estimated, timed
from indexcache_report.search import render
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.results.schema import GainResult, HeldOut, SpeedRow, Spread
from indexcache_search.results.variant import Kind
from indexcache_search.strategies.budget.table import LatencyTable
from sglang_indexcache import Pattern
from tests.search.made_results import (
    priced_content,
    row,
    sample_comparison,
    sample_content,
    sample_metrics,
)

CONTEXTS = (16384, 32768, 65536, 131072)


def frontier_of(content: dict[str, Any]) -> Frontier:
    frontier = estimated(sample_metrics(content).held_out)
    assert frontier is not None
    return frontier


def point(name: str, loss: float, speed: float, stderr: float | None = 0.01, kind: Kind = "named") -> Point:
    degrees = 0 if stderr is None else 1000
    increases = {"easy": Estimate(loss / 2, stderr, degrees), "hard": Estimate(loss, stderr, degrees)}
    speeds = {1024: Speed(speed, speed, speed)}
    return Point(names=(name,), kind=kind, pattern=name, full_layers=4, increases=increases, speeds=speeds)


def frontier(*points: Point) -> Frontier:
    base = point("base", 0.0, 1.0, 0.0, "baseline")
    return Frontier(points=(base, *points), sources=("easy", "hard"), contexts=(1024,), words="a GPU")


def test_a_pattern_found_twice_is_one_point() -> None:
    content = priced_content()
    rows = {(line["name"], line["retention"]): line for line in content["held_out"]["rows"]}
    rows["uniform phase 1", "1/4"]["pattern"] = rows["greedy", "1/4"]["pattern"]
    names = [item.names for item in frontier_of(content).points]
    assert names[0] == ("baseline",) and names[-1] == ("uniform 1/4",)  # names before phases
    assert ("greedy 1/4", "uniform 1/4, phase 1") in names
    assert not any("mean" in name for item in names for name in item)


def test_patterns_of_dense_models_with_the_same_letters_stay_apart() -> None:
    """What they select is in their names alone."""
    content = sample_content()
    for line in content["held_out"]["rows"]:
        line["pattern"] = line["pattern"] and line["pattern"].replace("F", "D")
    content["held_out"]["rows"] += [row("8 pages", "1/2", 4, "DSDSDSDS", 0.1), row("9 pages", "1/2", 4, "DSDSDSDS", 0)]
    names = [item.name for item in frontier_of(content).points]
    assert "8 pages 1/2" in names and "9 pages 1/2" in names


def test_estimates_at_all_contexts_are_those_of_the_table() -> None:
    found = frontier_of(priced_content())
    table = LatencyTable.load("glm-5-tp8")
    assert found.contexts == CONTEXTS and found.speeds == "estimated" and "H100" in found.words
    error = found.largest_error
    assert error is not None and error == max(abs(one.expected_ms / one.measured_ms - 1) for one in table.checks)
    for item in found.points:
        assert item.pattern is not None
        for context in CONTEXTS:
            share = table.at(context).prompt_share(Pattern.parse(item.pattern), Pattern.full(8))
            speed = item.speeds[context]
            assert speed.value == pytest.approx(1 / share)
            width = 0.0 if item.kind == "baseline" else error
            assert (speed.low, speed.high) == pytest.approx((speed.value * (1 - width), speed.value * (1 + width)))


@pytest.mark.parametrize("change", ["another name", "other times"])
def test_a_table_from_a_file_gives_the_speeds_that_the_rows_have(change: str) -> None:
    content = priced_content()
    if change == "another name":
        content["held_out"]["prices"]["table"] = "mine"
    else:
        for line in content["held_out"]["rows"][1:]:
            line["prefill"] = line.get("prefill") and line["prefill"] * 0.9
    found = frontier_of(content)
    assert found.contexts == (131072,)
    stated = {line["pattern"]: line["prefill"] for line in content["held_out"]["rows"] if line["pattern"]}
    for item in found.points:
        assert item.speeds[131072].value == pytest.approx(1 / stated[item.pattern])


def test_a_pattern_without_a_price_is_listed_and_not_drawn() -> None:
    content = priced_content()
    line = content["held_out"]["rows"][1]
    line["pattern"] += "+0q32"
    del line["prefill"]
    found = frontier_of(content)
    [unknown] = [item for item in found.points if not item.speeds]
    assert unknown.names == ("greedy 1/2",) and unknown not in found.shown(131072)
    assert "no time known" in section(found, spelt)


def test_without_times_fewer_indexers_count_as_faster() -> None:
    found = frontier_of(sample_content())
    assert found.contexts == ()
    assert [item.full_layers for item in found.best(None)] == [2]  # a phase of uniform loses less than nothing
    advice = choose(found, None, 0.1)
    assert advice.point is not None and advice.point.full_layers == 2
    assert "No times are known for this model" in section(found, spelt)


def test_there_is_no_section_without_patterns_to_choose_from() -> None:
    content = sample_content()
    content["held_out"]["rows"] = content["held_out"]["rows"][:1]
    assert estimated(sample_metrics(content).held_out) is None
    assert section(None, spelt) == ""
    assert "Loss beside speed" not in render(sample_metrics({**content, "steps": []}))
    study = sample_content()
    study["held_out"]["rows"][1]["extra"] = {"skips reading": {"mean": 0.5, "stderr": None}}
    assert estimated(sample_metrics(study).held_out) is None


def test_the_fastest_within_the_limit_is_taken() -> None:
    points = frontier(point("a", 0.01, 1.2), point("b", 0.09, 1.5), point("c", 0.3, 1.9), point("d", 0.4, 2.5))
    advice = choose(points, 1024, 0.1)
    assert advice.point is not None and advice.faster is not None
    assert (advice.point.name, advice.faster.name, advice.compared) == ("b", "c", 4)
    assert advice.unsettled  # 0.09 and two errors of 0.01
    for limit, name in ((0.02, "a"), (0.3, "c"), (0.5, "d")):
        chosen = choose(points, 1024, limit).point
        assert chosen is not None and chosen.name == name
    last = choose(points, 1024, 0.5)
    assert last.faster is None and not last.unsettled


def test_of_equally_fast_ones_the_one_that_loses_least_is_taken() -> None:
    chosen = choose(frontier(point("a", 0.05, 1.5), point("b", 0.02, 1.5 + 1e-9)), 1024, 0.1).point
    assert chosen is not None and chosen.name == "b"


def test_none_is_taken_where_none_is_good_enough() -> None:
    points = frontier(point("a", 0.5, 1.5), point("b", 0.3, 1.2))
    advice = choose(points, 1024, 0.1)
    assert advice.point is None and advice.closest is not None and advice.closest.name == "b" and not advice.unsettled
    page = section(points, spelt)
    assert "Take none of these" in page and "b loses least: 0.300 on hard" in page
    slow = choose(frontier(point("a", 0.0, 0.9)), 1024, 0.1)
    assert slow.point is slow.closest is None and slow.compared == 0


def test_a_loss_that_is_no_number_is_never_advised() -> None:
    """It would compare as neither above nor below the limit."""
    points = frontier(point("a", math.nan, 2.0), point("b", 0.01, 1.2), point("c", math.inf, 3.0))
    chosen = choose(points, 1024, 0.1)
    assert chosen.point is not None and chosen.point.name == "b" and chosen.faster is None
    assert points.points[1].hardest in ("easy", "hard") and not points.points[1].finite
    page = section(points, spelt)
    assert "a: its loss is NaN or infinite" in page


def test_an_unknown_error_does_not_settle_anything() -> None:
    points = frontier(point("a", 0.01, 1.5, None))
    assert choose(points, 1024, 0.1).unsettled
    assert "its error is unknown" in section(points, spelt)


def test_of_two_sequences_hardly_anything_is_settled() -> None:
    """0.02 and two errors of 0.02 is within 0.1; with one degree of freedom it is 14 errors."""
    few = dict.fromkeys(("easy", "hard"), Estimate(0.02, 0.02, 1))
    points = frontier(replace(point("a", 0.02, 1.5), increases=few))
    assert choose(points, 1024, 0.1).unsettled and not choose(points, 1024, 0.5).unsettled
    page = section(points, spelt)
    assert "Take this one: a" in page and "the loss may be 0.299, above 0.1" in page
    assert "the loss may be" not in section(frontier(point("a", 0.02, 1.5, 0.02)), spelt).partition("frontier-data")[0]


@pytest.mark.parametrize(
    ("stderr", "said"), [(0.03, "b may lose as little as 0.060, within 0.1"), (None, "the error of b is unknown")]
)
def test_that_none_is_to_be_taken_may_be_open(stderr: float | None, said: str) -> None:
    points = frontier(point("a", 0.5, 1.5), point("b", 0.12, 1.2, stderr))
    advice = choose(points, 1024, 0.1)
    assert advice.point is None and advice.unsettled and advice.possible is not None and advice.possible.name == "b"
    page = section(points, spelt).partition("frontier-data")[0]
    assert "Take none of these" in page and "Not settled" in page and said in page
    sure = section(frontier(point("a", 0.5, 1.5), point("b", 0.12, 1.2, 0.005)), spelt)
    assert "Take none of these" in sure and "Not settled" not in sure.partition("frontier-data")[0]


def test_a_bar_is_where_the_loss_may_be() -> None:
    """Student's interval, cut off at the figure; over all of it where nothing is known."""
    heights = []
    for estimate in (Estimate(0.05, 0.001, 1000), Estimate(0.05, 0.001, 1), Estimate(0.05, None)):
        drawn = str(chart(frontier(replace(point("a", 0.05, 1.5), increases={"easy": estimate, "hard": estimate}))).svg)
        path = re.search(r'id="frontier-1-loss">\s*<path d="M [\d.]+ ([\d.]+)\s*L [\d.]+ ([\d.]+)', drawn)
        assert path is not None
        heights.append(abs(float(path[1]) - float(path[2])))
    assert heights[0] < heights[1] < heights[2] and heights[2] == pytest.approx(330 - 8 - 44, abs=1)


def test_what_a_loss_means_is_said_in_likelihoods() -> None:
    assert [less_likely(nats) for nats in ALLOWANCES] == ["1 %", "2 %", "5 %", "10 %", "18 %", "39 %"]


def time_of(name: str, context: int, concurrency: int, first: Spread, gain: Spread | None = None) -> SpeedRow:
    return SpeedRow(
        name=name,
        retention=None,
        context=context,
        concurrency=concurrency,
        output_tokens=1,
        turns=5,
        first_token_ms=first,
        gain=None if gain is None else GainResult(first_token=gain),
        source="measured",
        basis="two GPUs",
    )


def spread(median: float, low: float | None = None, high: float | None = None) -> Spread:
    return Spread(median=median, low=low, high=high)


def of_servers() -> HeldOut:
    content = sample_content()
    rows = [row("baseline", "1", 8, None, 0.0, "baseline"), row("shared", "1", 8, None, 0.02)]
    for line in rows:
        line |= {"retention": None, "full_layers": None}
    content["held_out"]["rows"] = rows
    return sample_metrics(content).held_out


TIMES = [
    time_of("baseline", 8192, 1, spread(100.0, 90.0, 120.0)),
    time_of("shared", 8192, 1, spread(80.0, 75.0, 90.0), spread(1.25, 1.1, 1.4)),
    time_of("baseline", 32768, 1, spread(400.0, 390.0, 420.0)),
    time_of("shared", 32768, 1, spread(200.0, 195.0, 210.0), spread(2.0, 1.9, 2.2)),
    time_of("baseline", 32768, 8, spread(4000.0)),
    time_of("shared", 32768, 8, spread(4000.0), spread(1.0)),
]


def test_measured_times_of_servers_become_speeds() -> None:
    found = timed(of_servers(), TIMES)
    assert found is not None and found.contexts == (8192, 32768) and found.speeds == "measured"
    assert found.points[0].speeds[8192] == Speed(1.0, 1.0, 1.0, 100.0)
    assert found.points[1].speeds == {8192: Speed(1.25, 1.1, 1.4, 80.0), 32768: Speed(2.0, 1.9, 2.2, 200.0)}
    page = section(found, spelt, "servers")
    assert "Speeds were measured, by TTFT, the time to the first token: two GPUs" in page and "estimate" not in page
    assert "2.00x, 200 ms" in page and "Serve it" not in page and "A letter for each layer" not in page


def test_the_page_of_a_comparison_shows_measured_times() -> None:
    compared = sample_comparison().model_copy(update={"held_out": of_servers(), "speed": TIMES})
    page = comparison.render(compared)
    assert "Speeds were measured, by TTFT, the time to the first token: two GPUs" in page and "200 ms" in page
    assert "Speeds are estimates" not in page


def test_times_that_are_estimates_are_called_so() -> None:
    made = [
        time.model_copy(update={"source": "estimated", "basis": "times of 8 layers", "first_token_ms": spread(1.0)})
        for time in TIMES[:2]
    ]
    found = timed(of_servers(), made)
    assert found is not None and found.points[1].speeds == {8192: Speed(1.25, 1.1, 1.4)}
    page = section(found, spelt, "servers")
    assert "Speeds are estimates" in page and "times of 8 layers" in page and " ms" not in page


def test_servers_without_times_are_no_choice() -> None:
    assert timed(of_servers(), []) is None
    assert timed(of_servers(), TIMES[:1]) is None  # the other server has none
    assert timed(of_servers(), TIMES[1:2]) is None  # the baseline has none


def test_drawn_positions_follow_speeds_and_losses() -> None:
    found = frontier_of(priced_content())
    drawn = chart(found)
    for number, context in enumerate(CONTEXTS):
        known = [(item.speeds[context].value, place) for item, place in zip(found.points, drawn.x[number], strict=True)]
        speeds, places = zip(*sorted((speed, place) for speed, place in known if place is not None), strict=True)
        assert len(speeds) == len(found.points) and list(places) == sorted(places)
        assert all(low <= value <= high for low, value, high in places)
    assert drawn.limits == sorted(drawn.limits, reverse=True)  # more loss is further up
    assert len(drawn.line) == len(CONTEXTS) and drawn.line[0].count(" L ") == len(found.best(CONTEXTS[0])) - 1
    assert not chart(found, "text.jsonl").line


def test_a_page_has_the_bytes_that_the_same_result_had() -> None:
    assert render(sample_metrics(priced_content())) == render(sample_metrics(priced_content()))


def test_a_model_of_78_layers_has_a_page_below_a_megabyte() -> None:
    content = priced_content()
    layers, steps = 78, []
    content["pattern_file"]["model"]["num_layers"] = layers
    content["pattern_file"]["pattern"] = "FS" * 39
    for line in content["held_out"]["rows"]:
        line["pattern"] = line["pattern"] and line["pattern"] * 10
        line.pop("prefill", None)
    for layer in range(1, layers):
        pattern = "F" * (layers - layer) + "S" * layer
        losses = {str(other): 2.1 for other in range(layers)}
        steps.append({**content["steps"][0], "layer": layer, "pattern": pattern, "candidates": losses})
    content["steps"], content["overlap"] = steps, [[0.5] * 80] * 80
    sources = {f"source {number}.jsonl": None for number in range(8)}
    content["held_out"] |= {"sources": list(sources), "answer_sources": [], "prices": None}
    for line in content["held_out"]["rows"]:
        line["by_source"] = dict.fromkeys(sources, line["by_source"]["text.jsonl"])
    for page in (render(sample_metrics(content)), comparison.render(sample_comparison(content))):
        assert 50_000 < len(page.encode()) < 1_000_000


def test_names_cannot_leave_the_data_of_the_script() -> None:
    content = priced_content()
    content["held_out"]["rows"][1]["name"] = "</script><script>alert(1)//"
    page = render(sample_metrics(content))
    assert "<script>alert" not in page
    data = page.partition('id="frontier-data">')[2].partition("</script>")[0]
    assert any("alert(1)" in name for name in json.loads(data)["names"])


def test_a_served_pattern_is_named_by_the_file_or_by_letters() -> None:
    page = render(sample_metrics(priced_content()))
    assert "--indexcache-pattern pattern.yaml@1/2" in page.partition("frontier-data")[0]
    assert "--indexcache-pattern pattern.yaml@1/4" in page.partition("frontier-data")[2]  # with another limit
    assert "--indexcache-pattern FFSSFSFS" in comparison.render(sample_comparison())
    dense = Point(names=("a",), kind="named", pattern="DSDS", full_layers=2, increases={}, speeds={})
    assert spelt(dense) is None
    given = replace(dense, served="--indexcache-pattern 'my dir/pattern.yaml@1/4' --attention-backend flashinfer")
    assert spelt(given) == given.served
