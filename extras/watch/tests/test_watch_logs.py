"""indexcache-watch: logs of requests, as servers, logrotate and people leave them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from extras.watch.tests.watching import finished
from indexcache_search.errors import DataError
from indexcache_watch.requests import RequestLog
from tests.search.test_fuzz import mutated, one_line_or


def found(path: Path) -> list[tuple[list[int], list[bool]]]:
    return [(request.tokens.tolist(), request.counts.tolist()) for request in RequestLog(path).new()]


def test_logs_of_sglang_are_read_with_those_that_it_renamed(tmp_path: Path) -> None:
    received = json.dumps({"event": "request.received", "rid": "1", "obj": {"input_ids": [1]}})
    (tmp_path / "host_0.log.2026-11-28_06").write_text(finished([1, 2], [3]))
    (tmp_path / "host_0.log").write_text(f"[2026-11-28 07:13:41] {received}\n" + finished([4], [5, 6]))
    (tmp_path / ".hidden.log").write_text("no JSON")
    (tmp_path / "notes.txt").write_text("no JSON")
    assert sorted(found(tmp_path)) == [([1, 2, 3], [False, False, True]), ([4, 5, 6], [False, True, True])]


def test_what_is_no_request_of_a_client_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        finished([1], [2], log_metrics=False)  # a health check, or one of the watch itself
        + finished([1], [])
        + json.dumps(
            {"event": "request.finished", "obj": {"text": "hi", "input_ids": None}, "out": {"output_ids": [1]}}
        )
        + "\n"
        + finished([1, "...", 2], [3])
        + finished([1, 2], [3]).replace('"meta_info": {}', '"meta_info": {"prompt_tokens": 9}')
        + finished([1, 2], [3]).replace('"meta_info": {}', '"meta_info": {"prompt_tokens": 2, "completion_tokens": 7}')
    )
    log = RequestLog(tmp_path)
    assert list(log.new()) == []
    assert log.skipped == {
        "none of its tokens count": 1,
        "its log has the prompt as text, or not at all": 1,
        "its log is cut, expected --log-requests-level 3": 1,
        "its log has not all of its input_ids": 1,
        "its log has not all of its output_ids": 1,
    }


def test_rows_of_a_searchs_data_are_requests(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 1, 0]},
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"input_ids": [7, 8], "output_ids": [9]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))  # no line break at the end
    assert found(path) == [
        ([1, 2, 3, 4], [False, False, True, False]),
        ([1, 2], [False, True]),
        ([7, 8, 9], [False, False, True]),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input_ids": [1, 2], "response_ids": [3]}', "has input_ids alone, expected loss_mask, labels or output_ids"),
        ('[{"input_ids": [1, 2], "output_ids": [3]}]', "not an object such as {...}; expected one on each line"),
    ],
)
def test_rows_that_nobody_can_score_are_refused_without_a_line_break_too(
    text: str, message: str, tmp_path: Path
) -> None:
    """The prompt counted as if a model had written it; a list on a last line was taken for a line being written."""
    for end in ("\n", ""):
        (tmp_path / "rows.jsonl").write_text(text + end)
        with pytest.raises(DataError, match=rf"line 1: {re.escape(message)}"):
            found(tmp_path)


def test_a_byte_order_mark_may_begin_a_file(tmp_path: Path) -> None:
    mark = "\ufeff"  # written by editors on Windows
    (tmp_path / "rows.jsonl").write_text(mark + json.dumps({"input_ids": [1, 2], "output_ids": [3]}) + "\n")
    (tmp_path / "a.log").write_text(mark + finished([4], [5]))
    assert sorted(found(tmp_path)) == [([1, 2, 3], [False, False, True]), ([4, 5], [False, True])]


def test_a_log_is_read_on_from_its_end_and_a_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    line = finished([3], [4])
    path.write_text(finished([1], [2]) + line[:30])
    log = RequestLog(path)
    assert [request.place for request in log.new(last=False)] == [f"{path}: line 1"]
    assert list(log.new()) == []  # cut off, so still being written
    path.write_text(finished([1], [2]) + line)
    assert [request.place for request in log.new()] == [f"{path}: line 2"]
    path.rename(tmp_path / "a.log.2026-11-28_07")
    log.path = tmp_path / "a.log.2026-11-28_07"
    assert list(log.new()) == []


def test_a_log_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(finished([1], [2]) + finished([3], [4]))
    log = RequestLog(tmp_path)
    assert len(list(log.new())) == 2
    path.write_text(finished([5], [6]))
    assert [request.tokens.tolist() for request in log.new()] == [[5, 6]]


def test_as_many_bad_rows_are_left_out_as_allowed(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text('{"torn' + finished([1], [2]) + finished([3], [4]) + "{}\n")
    log = RequestLog(path, skip_bad=2)
    assert [request.place for request in log.new()] == [f"{path}: line 2"]
    assert log.skipped == {"it can't be understood": 2}
    with pytest.raises(DataError, match=r"line 3: has no input_ids, .*; --skip-bad N leaves out up to N such rows"):
        list(RequestLog(path, skip_bad=1).new())


def test_a_thousand_mutated_logs(tmp_path: Path) -> None:
    rng, accepted, path = random.Random(11), 0, tmp_path / "a.log"
    for _ in range(1_000):
        lines = [finished([rng.randrange(99) for _ in range(8)], [rng.randrange(99)]) for _ in range(2)]
        lines += [json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}) + "\n"]
        path.write_bytes(mutated("".join(lines), rng).encode("utf-8", "surrogatepass"))
        requests = one_line_or(lambda: list(RequestLog(path).new()))
        accepted += requests is not None
        for request in requests or ():
            assert request.counts.any() and len(request.counts) == len(request.tokens) and request.tokens.min() >= 0
    assert 0.01 < accepted / 1_000 < 0.95
