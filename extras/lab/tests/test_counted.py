"""Misses that a calibration server counts: what it records, what a client asks for and believes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_lab.offload.counted import misses, misses_on
from indexcache_lab.offload.lru_buffer import hisparse_misses
from indexcache_lab.offload.selections import MISSES, Selections
from indexcache_search.engines import sglang
from indexcache_search.engines.calibration_client import ServerLostError
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import SearchError
from sglang_indexcache import IndexCacheError
from sglang_indexcache.calibration.divergence import Divergence
from sglang_indexcache.calibration.measure import Measure
from sglang_indexcache.calibration.overlap import Overlap
from sglang_indexcache.calibration.preflight import CalibrationError
from sglang_indexcache.calibration.protocol import Measured
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io.extensions import extensions
from sglang_indexcache.io.messages import BUSY
from tests.conftest import made_up
from tests.core.test_control import Scheduler, _no_sglang, ask, controller
from tests.search.calibration_stub import DATA, MODEL, PATTERNS, Stub
from tests.search.test_answers import answering, mutated, ranks, server, spoilt
from tests.search.test_calibration_lease import by_a_thief, by_somebody_else, client
from tests.search.test_measuring import forward_batch, registered

__all__ = ["_no_sglang", "answering", "registered"]
STEPS = 4


def missed(layer: int, row: int, size: int) -> int:
    """Made up, and no more than the steps select."""
    return made_up(layer, row, size) % (STEPS * MODEL.index_topk + 1)


class Counting(Stub):
    """A stub that records, too."""

    def restart(self, ranks: int) -> None:
        super().restart(ranks)
        self.range, self.recorded = (0, 0), list[int]()

    def control(self, action: str, body: Any, rank: int) -> dict[str, Any]:
        if action == "record":
            self.range, self.recorded = (body["first"], body["tokens"]), []
        if action == "misses":
            full = [layer for layer, role in enumerate(self.patterns[rank]) if role == "F"]
            [row] = self.recorded
            return {"misses": {str(layer): [missed(layer, row, size) for size in body["sizes"]] for layer in full}}
        return super().control(action, body, rank)

    def generate(self, body: Any) -> Any:
        for measured in map(Measured.parse, body.get("rid", [])):
            if measured is not None and measured.what == MISSES:
                assert self.range == (DATA.seq_len - STEPS, len(body["input_ids"][0]))
                self.recorded.append(measured.sequence)
        return super().generate(body)


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stub]]:
    monkeypatch.setattr(sglang, "_Loss", partial(sglang._Loss, pause=0.01))
    made: list[Stub] = [Counting() for _ in range(2)]
    for stub in made:
        stub.measures = [*stub.measures, MISSES]
    yield made
    for stub in made:
        stub.http.shutdown()
        stub.http.server_close()


def engine(*stubs: Stub) -> SglangEngine:
    return SglangEngine([client(stub) for stub in stubs], MODEL, patience=0.5)


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is selected as positions plus 100 for each request before."""
    backend = SimpleNamespace(get_indexer_metadata=lambda layer, batch: None)
    for name in ("sglang", "sglang.srt", "sglang.srt.model_executor"):
        monkeypatch.setitem(__import__("sys").modules, name, SimpleNamespace())
    context = SimpleNamespace(get_attn_backend=lambda: backend)
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.model_executor.forward_context", context)
    monkeypatch.setattr(
        "indexcache_lab.offload.positions.positions_of",
        lambda metadata, selected, rows, requests: (selected - 100 * requests[:, None]).int(),
    )


def test_servers_find_it_by_its_entry_point() -> None:
    assert extensions("measures", Measure)[MISSES] is Selections


def counting(fits: bool = True) -> Any:
    control = controller(Divergence(1), Overlap(), [Selections()])
    if not fits:
        control._calibration._family = replace(DSA)
    return control


@pytest.mark.parametrize(
    ("action", "body", "message"),
    [
        ("record", {}, "first is 0 and tokens 0, expected 0 < first < tokens"),
        ("record", {"first": 8, "tokens": 8}, "first is 8 and tokens 8"),
        ("misses", {}, "sizes is missing, expected a list of tokens"),
        ("misses", {"sizes": [16, 0]}, "sizes is missing"),
    ],
)
def test_requests_that_make_no_sense(action: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(IndexCacheError, match=message):
        ask(Scheduler(), action, counting(), **body)


def test_a_family_that_cannot_tell_positions_records_nothing() -> None:
    assert ask(Scheduler(), "status", counting())["measures"] == ["kl", "overlap", "misses"]
    control = counting(fits=False)
    assert ask(Scheduler(), "status", control)["measures"] == ["kl", "overlap"]
    for action in ("record", "misses"):
        with pytest.raises(IndexCacheError, match="selections are not recorded of this model"):
            ask(Scheduler(), action, control, first=3, tokens=9, sizes=[4])


def test_misses_are_what_a_server_counted(stubs: list[Stub]) -> None:
    """Of one sequence after the other, with the pattern asked for; of another server where one is lost."""
    live, pattern = engine(*stubs), PATTERNS[1]
    for row in (1, 0):
        found = misses_on(live, pattern, DATA, row, steps=4, sizes=[8, 16])
        assert found == {layer: [missed(layer, row, size) for size in (8, 16)] for layer in pattern.full_layers}
    stubs[0].fail = lambda path: (0, None)
    assert sorted(misses_on(live, pattern, DATA, 1, steps=4, sizes=[8])) == list(pattern.full_layers)

    def wrong(path: str) -> tuple[int, Any] | None:
        answer = {"dp_rank": 0, **stubs[1].status(0), "misses": {"0": [1, 2]}}
        return (200, {"ranks": [answer]}) if path.endswith("/misses") else None

    stubs[1].fail = wrong
    with pytest.raises(SearchError, match="counted layers"):
        misses_on(live, pattern, DATA, 1, steps=4, sizes=[8])
    live.close()
    other = engine(stubs[1])
    other.answers = frozenset()
    with pytest.raises(SearchError, match="does not record what is selected"):
        misses_on(other, pattern, DATA, 0, steps=4, sizes=[8])


@pytest.mark.parametrize("act", [by_somebody_else, by_a_thief])
def test_a_count_under_which_somebody_switched(stubs: list[Stub], act: Callable[[Stub], None]) -> None:
    """It is made again, or not at all."""
    searching, stub = engine(stubs[0]), stubs[0]
    generated: list[str] = []

    def look(asked: str) -> None:
        if asked == "/generate":
            generated.append(stub.patterns[0])
            if len(generated) == 1:
                act(stub)

    stub.fail = lambda asked: look(asked)  # type: ignore[func-returns-value]
    if act is by_somebody_else:
        with pytest.raises(SearchError, match=r"somebody else switched it"):
            misses_on(searching, PATTERNS[0], DATA, 0, steps=STEPS, sizes=[8])
    else:
        misses_on(searching, PATTERNS[0], DATA, 0, steps=STEPS, sizes=[8])
        assert generated[-1] == PATTERNS[0].roles and len(generated) > 1
    searching.close()


RIGHT = ranks(misses={"0": [30, 7], "3": [32, 0]})


def count() -> dict[int, list[int]]:
    return misses(server(), [0, 3], [8, 16], most=32)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ranks(misses={"0": [10**9, 7], "3": [32, 0]}), "counted 1000000000 misses of a layer, which selects 32"),
        (ranks(misses={"0": [1.5, 7], "3": [32, 0]}), "ranks.0.misses.0.0: Input should be a valid integer"),
        (ranks(misses={"0": [1, 7]}), "counted layers"),
    ],
)
def test_answers_that_can_not_be(answer: Any, message: str, answering: Callable[..., None]) -> None:
    answering(json.dumps(answer).encode())
    with pytest.raises(IndexCacheError, match=message):
        count()


def test_four_hundred_answers(answering: Callable[..., None]) -> None:
    rng, refused = random.Random("answers misses"), 0
    for number in range(400):
        text = json.dumps(mutated(RIGHT, rng) if number else RIGHT).encode()
        answering(spoilt(text, rng) if number % 5 == 4 else text)
        try:
            found = count()
        except (IndexCacheError, ServerLostError) as error:
            refused += 1
            assert str(error).isprintable() and str(error).startswith("http://host:1: "), text
        else:
            assert sorted(found) == [0, 3] and all(0 <= item <= 32 for counts in found.values() for item in counts)
    assert refused > 100


def test_a_server_that_is_busy_is_lost_for_a_while(answering: Callable[..., None]) -> None:
    answering(b'{"error": "busy: requests are running"}', 409)
    with pytest.raises(ServerLostError, match=rf"http://host:1: .*{BUSY}"):
        count()


def recorded(selections: Selections, indices: Tensor, passes: Sequence[tuple[int, int]], rid: str) -> None:
    """A request's passes behind an ordinary one; layers 0 and 2 of three are F."""
    for first, last in passes:
        selections.before_forward(
            SimpleNamespace(device="cpu"), forward_batch([("other", 0, 4, 0), (rid, first, last - first, 0)])
        )
        for layer in range(3):
            rows = torch.cat([torch.zeros(4, 6, dtype=torch.long), indices[layer, first:last] + 100])
            selections.capture(layer_id=layer, topk_indices=rows.int())


def test_misses_are_those_of_the_recorded_selections(registered: list[Any]) -> None:
    """Over two chunks; S layers and what stands before the first step are left out."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.stack(
        [torch.stack([torch.randperm(max(6, at + 1), generator=generator)[:6] for at in range(40)]) for _ in range(3)]
    )
    selections = Selections()
    selections.begin(first=25, tokens=40, roles="FSF")
    assert registered == [selections]
    recorded(selections, indices, [(0, 20), (20, 30), (30, 40)], Measured(MISSES, 0, "data", "n").rid)
    found = selections.end([6, 12, 64])
    assert registered[-1] is None and sorted(found["misses"]) == ["0", "2"]
    for layer in (0, 2):
        steps = [(indices[layer, at].int().numpy(), at + 1) for at in range(25, 40)]
        assert found["misses"][str(layer)] == [sum(hisparse_misses(steps, size, 25)) for size in (6, 12, 64)]
        assert found["misses"][str(layer)][0] > found["misses"][str(layer)][1] > found["misses"][str(layer)][2] == 0
    selections.before_forward(
        SimpleNamespace(device="cpu"), forward_batch([(Measured(MISSES, 0, "data", "m").rid, 0, 4, 0)])
    )
    selections.capture(layer_id=0, topk_indices=torch.zeros(4, 6))  # nothing is recorded any more


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [([(0, 20), (20, 30)], "n")],  # not to its end
        [([(0, 40)], "n"), ([(0, 40)], "m")],
        [([(0, 40)], "n"), ([(30, 40)], "n")],  # run again
    ],
)
def test_what_was_not_recorded_once_is_an_error(registered: list[Any], requests: Any) -> None:
    indices = torch.arange(6).expand(3, 40, 6)
    selections = Selections()
    selections.begin(25, 40, "FSF")
    for passes, nonce in requests:
        recorded(selections, indices, passes, Measured(MISSES, 0, "data", nonce).rid)
    with pytest.raises(CalibrationError, match="recorded others than 15 queries of one request"):
        selections.end([6])
    assert registered[-1] is None


def test_a_buffer_that_holds_too_little_is_an_error(registered: list[Any]) -> None:
    selections = Selections()
    selections.begin(25, 40, "FSF")
    recorded(selections, torch.arange(6).expand(3, 40, 6), [(0, 40)], Measured(MISSES, 0, "data", "n").rid)
    with pytest.raises(IndexCacheError, match="a buffer of 5 items can't hold 6"):
        selections.end([5])
