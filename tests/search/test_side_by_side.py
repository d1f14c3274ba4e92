"""Sequences side by side: the same bits, two at a time, and nothing goes on behind an error or an interrupt."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event, main_thread
from typing import Any

import numpy as np
import pytest
import torch

from indexcache_search.engines import transformers as transformers_engine
from indexcache_search.engines.registry import Surroundings, kind_of
from indexcache_search.engines.settings import RunSettings
from indexcache_search.engines.side_by_side import side_by_side, with_same_weights
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from tests.conftest import LAYERS, random_tokens, tiny_config, tiny_engine, tiny_model

PATTERNS = [Pattern(roles) for roles in ("FFFFFF", "FSFFFF", "FFFFFS", "FFSSFF", "FSSSSS")]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def with_one_thread(engine: TransformersEngine, *asked: Any) -> list[Evaluation]:
    """What an engine gives without lanes: PyTorch's threads may change the last bits of small products."""
    torch.set_num_threads(1)
    found = list(engine.evaluate(*asked))
    torch.set_num_threads(2)
    return found


@pytest.mark.parametrize(
    ("objective", "rows"), [("nll", [3, 0, 4, 1]), ("nll", [2]), ("kl", None), ("kl", [1, 3])], ids=str
)
def test_the_same_bits(config: dict[str, Any], objective: Any, rows: list[int] | None) -> None:
    data = random_tokens(sequences=5)
    alone, beside = tiny_engine(config), tiny_engine(config).side_by_side()
    for _ in range(2):  # the second time from the lanes' caches
        expected = with_one_thread(alone, PATTERNS, data, objective, rows)
        found = list(beside.evaluate(PATTERNS, data, objective, rows))
        assert [replace(item, seconds=0.0) for item in found] == [replace(item, seconds=0.0) for item in expected]
    held = [len(lane._cache) for lane in lanes(beside)]
    assert not len(beside._cache) and all(held if rows is None else held[:1] if rows == [2] else held[-1:])


def lanes(engine: TransformersEngine) -> Sequence[TransformersEngine]:
    assert len(engine._lanes) == 2
    return engine._lanes


def test_the_same_matrices(config: dict[str, Any]) -> None:
    data, alone, beside = random_tokens(sequences=5), tiny_engine(config), tiny_engine(config).side_by_side()
    for name in ("overlap", "similarity"):
        torch.set_num_threads(1)
        expected = alone.matrix(name, data, 8)
        torch.set_num_threads(2)
        found = beside.matrix(name, data, 8)
        assert expected is not None and found is not None and np.array_equal(expected, found)


def test_lanes_share_weights_and_nothing_else(config: dict[str, Any]) -> None:
    model = tiny_model(config)
    other, tokens = with_same_weights(model), torch.from_numpy(random_tokens().tokens.astype(np.int64))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(one is second for one, second in pairs)
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        with apply_roles(model, Pattern("FSSSSS")):
            assert torch.equal(other(input_ids=tokens, use_cache=False).logits, expected)
            with apply_roles(other, Pattern.full(LAYERS)):  # would be refused on one model
                assert not torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)


def test_two_run_at_a_time_with_a_thread_each() -> None:
    both, threads = Barrier(2, timeout=120), set()

    def work(owner: str, rows: Sequence[int]) -> tuple[str, int]:
        both.wait()  # fails if one runs after the other
        threads.add(torch.get_num_threads())
        return owner, rows[0]

    found = side_by_side(["even", "odd"], work, [[3], [0], [1], [2]])
    assert found == [("odd", 3), ("even", 0), ("odd", 1), ("even", 2)]
    assert threads == {1} and torch.get_num_threads() == 2


def test_an_error_is_raised_and_no_lane_goes_on() -> None:
    began, finished, both_run, failed = [], [], Barrier(2, timeout=120), Event()

    def work(owner: str, rows: Sequence[int]) -> None:
        began.append(rows[0])
        if rows[0] < 2:
            both_run.wait()
        if rows[0] == 2:
            failed.set()
            raise ValueError("of one lane")
        if rows[0] % 2:
            assert failed.wait(120)
            time.sleep(0.5)
        finished.append(rows[0])

    with pytest.raises(ValueError, match="of one lane"):
        side_by_side(["even", "odd"], work, [[row] for row in range(40)])
    assert {0, 1, 2} <= {*began} and len(began) < 6 and len(finished) == len(began) - 1


def test_an_interrupt_ends_both() -> None:
    began, finished, both_run = [], [], Barrier(2, timeout=120)

    def work(owner: str, rows: Sequence[int]) -> None:
        began.append(rows[0])
        if rows[0] < 2:
            both_run.wait()
        if rows[0] == 2:
            signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.3 if rows[0] > 1 else 0)
        finished.append(rows[0])

    with pytest.raises(KeyboardInterrupt):
        side_by_side(["even", "odd"], work, [[row] for row in range(40)])
    assert sorted(began) == sorted(finished) and len(began) < 8  # raised when both stand still


def test_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config, data = tiny_config(), random_tokens(sequences=4)
    assert tiny_engine(config, batch_size=2).side_by_side()._lanes == []
    torch.set_num_threads(1)
    assert tiny_engine(config).side_by_side()._lanes == []
    torch.set_num_threads(2)
    other = type("Other", (TransformersEngine,), {})
    engine = tiny_engine(config)
    assert other(engine.torch_model, engine.model).side_by_side()._lanes == []  # what it keeps has no lanes
    engine.side_by_side()
    monkeypatch.setattr(transformers_engine, "LONG", data.seq_len - 1)
    monkeypatch.setattr(transformers_engine, "side_by_side", lambda *_: 1 / 0)
    assert len(list(engine.evaluate(PATTERNS, data, "nll"))) == len(PATTERNS)
    monkeypatch.setattr(transformers_engine, "LONG", data.seq_len)
    with pytest.raises(ZeroDivisionError):
        list(engine.evaluate(PATTERNS, data, "nll"))


def test_commands_have_it(model_folder: Path) -> None:
    around = Surroundings(log=lambda: None, announce=lambda _: None, warn=lambda _: None)  # type: ignore[arg-type, return-value]
    with ExitStack() as stack:
        kind = kind_of("transformers", tiny_engine(tiny_config()).model)
        engine: Any = stack.enter_context(kind.load(str(model_folder), RunSettings(device="cpu"), around))
        assert len(lanes(engine)) == 2
