"""Prompts that are timed on calibration servers, with each pattern that a search found in turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from indexcache_search.evaluation.journal import Journal
from indexcache_search.results.variant import NAMED, Variant
from indexcache_speed.prompt_times import measured_times, prompt_times
from sglang_indexcache import Pattern
from tests.conftest import LAYERS
from tests.search.calibration_stub import DATA, MODEL, PATTERNS, Stub, engine


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    made = [Stub(), Stub()]
    yield made
    for stub in made:
        stub.close()


def lines_of(*patterns: Pattern) -> list[Variant]:
    return [Variant.baseline(MODEL.native), *(Variant(NAMED, "lazy", None, pattern) for pattern in patterns)]


def test_prompts_are_timed_plainly_with_each_pattern_in_turn(stubs: list[Stub]) -> None:
    rows = prompt_times(engine(*stubs), lines_of(*PATTERNS[:2]), DATA)
    assert [row.name for row in rows] == ["baseline", "lazy", "lazy"]
    assert {(row.context, row.turns, row.output_tokens, row.token_ms) for row in rows} == {(DATA.seq_len, 5, 1, None)}
    assert {row.source for row in rows} == {"measured"} and all("calibration server" in row.basis for row in rows)
    ran = [pattern for _, pattern, _ in stubs[0].timed]
    first = [MODEL.native.roles, *(pattern.roles for pattern in PATTERNS[:2])]
    assert ran == [*first[::-1], *first] * 3 and not stubs[1].timed
    for _, _, body in stubs[0].timed:  # nothing is measured on them
        assert set(body) == {"input_ids", "sampling_params", "stream"} and len(body["input_ids"]) == DATA.seq_len


def test_prompts_are_timed_on_one_data_parallel_rank() -> None:
    stub = Stub(ranks=2)
    prompt_times(engine(stub), lines_of(PATTERNS[0]), DATA)
    assert {rank for rank, _, _ in stub.timed} == {0}
    assert stub.patterns[1] == "F" * LAYERS  # the other one was never switched
    stub.close()


def test_times_of_prompts_are_kept_in_the_journal(stubs: list[Stub], tmp_path: Path) -> None:
    measuring, found = engine(stubs[0]), []
    for lines in (lines_of(PATTERNS[0]), lines_of(PATTERNS[0]), lines_of(PATTERNS[1])):
        with Journal(tmp_path, {"of": "a search"}, {}) as journal:
            found.append(measured_times(measuring, lines, DATA, journal))
    assert found[0] == found[1] != found[2] and len(stubs[0].timed) == 24


def test_times_of_prompts_move_to_another_server(stubs: list[Stub]) -> None:
    measuring = engine(*stubs, patience=0.0)
    stubs[0].fail = lambda path: (0, None) if path == "/generate" else None
    assert len(prompt_times(measuring, lines_of(PATTERNS[0]), DATA)) == 2
    assert len(stubs[1].timed) == 12
