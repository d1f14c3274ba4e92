"""The comparison with bench_serving: what it reads, what counts as a difference."""

from __future__ import annotations

import json
import types

from indexcache_search.results.schema import SpeedRow, Spread
from scripts.bench.serving.speed import cell, with_text


def test_tokens_without_a_text_get_one_and_nothing_else_changes() -> None:
    serving = types.SimpleNamespace(orjson=json)
    events = [{"output_ids": [1], "meta_info": {}}, {"output_ids": [1], "text": "a"}, {"output_ids": []}, [1]]
    with with_text(serving):
        read = [serving.orjson.loads(json.dumps(event)) for event in events]
    assert read == [{"output_ids": [1], "meta_info": {}, "text": "x"}, *events[1:]] and serving.orjson is json


def test_a_difference_is_that_of_the_medians() -> None:
    row = SpeedRow(
        name="a",
        retention=None,
        context=1,
        concurrency=1,
        output_tokens=2,
        turns=5,
        first_token_ms=Spread(median=103.0, low=1.0, high=200.0),
        source="measured",
        basis="",
    )
    found = cell("a", "first_token_ms", row, [1.0, 100.0, 300.0])
    assert round(found["difference"], 6) == 0.03 and found["bench_serving"] == 100.0
