"""The live engine against servers that answer like SGLang's: sharing work, losing servers, refusals."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexcache_search.engines import calibration_client as calibration_server
from indexcache_search.engines import own_server
from indexcache_search.engines.answers import same_tokens
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.errors import SearchError
from indexcache_search.searching.run import prices_of
from indexcache_search.strategies.base import Goal
from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.families import describe
from sglang_indexcache.io.messages import BUSY
from tests.conftest import LAYERS
from tests.search.calibration_stub import (
    DATA,
    PATTERNS,
    STATUS,
    VERSIONS,
    Stub,
    divergence,
    engine,
    expected,
    scored,
)


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    made = [Stub(), Stub()]
    yield made
    for stub in made:
        stub.close()


def test_losses_are_sums_over_the_scored_tokens(stubs: list[Stub]) -> None:
    for batch_size in (1, 2):
        found = list(engine(stubs[0], batch_size=batch_size).evaluate(PATTERNS[:2], DATA, "nll"))
        assert [item.pattern for item in found] == PATTERNS[:2]
        for item in found:
            assert list(item.losses) == pytest.approx(expected(item.pattern), abs=1e-12)
            assert item.tokens == tuple(DATA.scored.sum(axis=1))
            assert item.correct == tuple(int(DATA.scored[row][1::2].sum()) for row in range(DATA.num_sequences))


def test_kl_is_summed_over_the_rows_that_predict_scored_tokens(stubs: list[Stub]) -> None:
    scored = DATA.scored.copy()
    scored[0, 20:23] = False
    data = dataclasses.replace(DATA, scored=scored)
    for batch_size in (1, 2):
        found = list(engine(stubs[0], batch_size=batch_size).evaluate(PATTERNS[:2], data, "kl"))
        for item in found:
            for row, loss in enumerate(item.losses):
                rows = [[int(token) - 1, int(token)] for token in np.flatnonzero(scored[row])]
                assert loss == pytest.approx(divergence(item.pattern.roles, rows)[0], abs=1e-9)


def test_the_baseline_is_run_once_and_again_after_a_restart(stubs: list[Stub]) -> None:
    live = engine(stubs[0])
    kept: list[int] = []
    generate = stubs[0].generate
    stubs[0].generate = lambda body: kept.append("keep" in body["rid"][0]) or generate(body)  # type: ignore
    list(live.evaluate(PATTERNS[:3], DATA, "kl"))
    assert sum(kept) == DATA.num_sequences
    stubs[0].kept = [set()]
    list(live.evaluate(PATTERNS[:1], DATA, "kl"))
    assert sum(kept) == 2 * DATA.num_sequences
    generate, stubs[0].kept = (lambda body: [{"meta_info": stubs[0].scores("F", body["input_ids"][0], 8)}]), [set()]
    with pytest.raises(SearchError, match="kept no baseline of sequence 0"):
        list(live.evaluate(PATTERNS[:1], DATA, "kl"))


def test_data_parallel_ranks_run_patterns_side_by_side() -> None:
    stub = Stub(ranks=2)
    for objective in ("nll", "kl"):
        with closing(engine(stub)) as live:
            found = {item.pattern: item for item in live.evaluate(PATTERNS, DATA, objective)}
        assert set(found) == set(PATTERNS)
        if objective == "nll":
            assert all(list(item.losses) == pytest.approx(expected(pattern)) for pattern, item in found.items())
    assert len(set(stub.patterns)) == 2
    CalibrationServer(stub.url).switch(PATTERNS[0])  # as a whole
    assert stub.patterns == [PATTERNS[0].roles] * 2


def test_overlap(stubs: list[Stub]) -> None:
    assert (engine(stubs[0]).matrix("overlap", DATA, 5) == np.eye(LAYERS)).all()
    assert len(stubs[0].positions) == 5
    stubs[0].measures = []
    assert engine(stubs[0]).matrix("overlap", DATA, 5) is None


def test_overlap_moves_to_another_server(stubs: list[Stub]) -> None:
    live = engine(*stubs, patience=0.5)
    stubs[0].fail = lambda path: (0, None)
    assert (live.matrix("overlap", DATA, 5) == np.eye(LAYERS)).all() and stubs[1].sampled == DATA.num_sequences
    stubs[1].fail = lambda path: (0, None)
    with pytest.raises(SearchError, match="no server came back"):
        live.matrix("overlap", DATA, 5)


def test_where_its_servers_run(stubs: list[Stub]) -> None:
    stubs[0].versions = {**VERSIONS, "sglang": "0.5.23+cu130", "device": "NVIDIA H200"}
    live = engine(stubs[0])
    assert live.place == ("NVIDIA H200", "0.5.23")
    config = {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 12, "index_topk": 2048}
    live.model = describe(config, "glm")
    prices = prices_of(live, Goal(native=live.model.native, full_layers={}), lambda line: None)
    servers = "while its servers have NVIDIA H200, not NVIDIA H100 80GB HBM3, SGLang 0.5.23, not 0.5.17"
    assert prices is not None and prices.words.endswith(servers)
    assert engine(stubs[1]).place == (None, "0.5.23")


def test_what_a_result_depends_on(stubs: list[Stub]) -> None:
    live = engine(stubs[0], batch_size=2)
    assert live.name == "sglang 0.5.23"
    assert live.settings == {"torch": "2.14.1", "dtype": "float32", "batch_size": "2"}


def test_two_servers_share_the_work(stubs: list[Stub]) -> None:
    found = {item.pattern: item.losses for item in engine(*stubs).evaluate(PATTERNS, DATA, "nll")}
    assert set(found) == set(PATTERNS)
    assert all(list(losses) == pytest.approx(expected(pattern)) for pattern, losses in found.items())
    assert min(stub.requests for stub in stubs) > 1


@pytest.mark.parametrize("code", [0, 500, 503])
def test_a_lost_server_loses_no_evaluation(stubs: list[Stub], code: int) -> None:
    count = 0

    def fail(path: str) -> tuple[int, Any] | None:
        nonlocal count
        count += path == "/generate"
        return (code, {}) if count > 2 else None

    lines: list[str] = []
    live = engine(*stubs, patience=0.5, notice=lines.append)
    stubs[0].fail = fail
    for _ in range(2):
        found = {item.pattern: item.losses for item in live.evaluate(PATTERNS, DATA, "nll")}
        assert all(list(found[pattern]) == pytest.approx(expected(pattern)) for pattern in PATTERNS)
    assert len([line for line in lines if line.startswith("lost")]) == 1 + len(
        [line for line in lines if "back" in line]
    )


def test_a_server_that_comes_back_goes_on(stubs: list[Stub]) -> None:
    lines: list[str] = []
    live = engine(stubs[0], patience=30, notice=lines.append)
    gone = iter([None] * 3 + [(0, None)] * 2)
    stubs[0].fail = lambda path: next(gone, None)
    found = {item.pattern: item.losses for item in live.evaluate(PATTERNS, DATA, "nll")}
    assert all(list(found[pattern]) == pytest.approx(expected(pattern)) for pattern in PATTERNS)
    assert len(lines) == 2 and lines[0].startswith(f"lost {stubs[0].url}: ") and "waiting for it up to 30 s" in lines[0]
    assert lines[1] == f"{stubs[0].url} is back"


def test_a_server_that_comes_back_as_another_one_is_refused(stubs: list[Stub]) -> None:
    live = engine(stubs[0], patience=30)
    gone = iter([(0, None)])
    stubs[0].fail = lambda path: next(gone, None)
    stubs[0].versions = {**VERSIONS, "dtype": "bfloat16"}
    with pytest.raises(SearchError, match="expected the same"):
        list(live.evaluate(PATTERNS, DATA, "nll"))


def test_when_all_stay_away_it_says_so(stubs: list[Stub]) -> None:
    live = engine(*stubs, patience=0.6)
    for stub in stubs:
        stub.fail = lambda path: (0, None)
    with pytest.raises(SearchError, match=r"no server came back within 1 s: http://127"):
        list(live.evaluate(PATTERNS, DATA, "nll"))


def test_a_busy_server_is_waited_for(stubs: list[Stub], monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (409, {"error": f"busy: {BUSY}"})
    answers = iter([busy, busy])
    stubs[0].fail = lambda path: next(answers, None) if path == "/indexcache/switch" else None
    live = engine(stubs[0])
    assert len(list(live.evaluate(PATTERNS[:1], DATA, "nll"))) == 1
    live.close()
    monkeypatch.setattr(calibration_server, "BUSY_SECONDS", 0.1)
    stubs[0].fail = lambda path: busy if path == "/indexcache/switch" else None
    with pytest.raises(calibration_server.ServerLostError, match=f"busy: {BUSY}"):
        CalibrationServer(stubs[0].url).switch(PATTERNS[0])


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/indexcache/status", (404, {"detail": "Not Found"}), "is not in calibration mode"),
        (
            "/indexcache/status",
            (200, {"pattern": "FFFFFF"}),
            "answers in another form: ranks: Field required; expected",
        ),
        ("/indexcache/status", (200, []), "answers in another form"),
        ("/indexcache/status", (302, {}), "redirects are not followed"),
        ("/indexcache/status", (401, {"error": "Unauthorized"}), "refuses the key; expected the admin key"),
        ("/indexcache/switch", (400, {"error": "CUDA graphs are on"}), "CUDA graphs are on"),
        (
            "/indexcache/switch",
            (
                200,
                {
                    "ranks": [
                        {**STATUS, "dp_rank": 1, "pattern": "FFFFFF", "fingerprint": Pattern("FFFFFF").fingerprint}
                    ]
                },
            ),
            "rank 1 runs FFFFFF, expected FS",
        ),
        ("/indexcache/switch", (200, {"ranks": []}), "has no data-parallel rank None"),
        ("/generate", (400, {"error": {"message": "too long"}}), "too long"),
        ("/generate", (200, []), "gave 0 answers to 1 sequences"),
        ("/generate", (200, [{"meta_info": {}}]), "answers in another form: 0.meta_info.input_token_logprobs"),
        ("/generate", (409, {"error": "busy"}), "/generate answers 409"),
        ("/generate", (200, [scored(value=0.5)]), "answers with a logprob above 0"),
        ("/generate", (200, [scored(shift=1)]), "without input logprobs of the tokens that were sent"),
        ("/generate", (200, [scored(last=-1)]), "without input logprobs of the tokens that were sent"),
    ],
)
def test_refusals_end_the_search(stubs: list[Stub], path: str, answer: Any, message: str) -> None:
    stubs[0].fail = lambda asked: answer if asked == path else None
    with pytest.raises(SearchError, match=message):
        list(engine(stubs[0]).evaluate(PATTERNS[:1], DATA, "nll"))


def test_servers_must_be_of_one_kind(stubs: list[Stub]) -> None:
    stubs[1].versions = {**VERSIONS, "dtype": "bfloat16"}
    with pytest.raises(SearchError, match="expected the same"):
        engine(*stubs)
    stubs[1].config_sha256 = "0" * 64
    with pytest.raises(SearchError, match="serves another model than --model tiny"):
        engine(*stubs)
    with pytest.raises(IndexCacheError, match="host:30000: expected a URL like http"):
        CalibrationServer("host:30000").status()


def test_losses_that_are_not_numbers_stay_so(stubs: list[Stub]) -> None:
    """SGLang writes NaN as null; the search stops at it, with its own line."""
    scores = stubs[0].scores

    def poisoned(pattern: str, tokens: list[int], start: int) -> dict[str, Any]:
        found = scores(pattern, tokens, start)
        found["input_token_logprobs"][-1][0] = None
        return found

    stubs[0].scores = poisoned  # type: ignore[method-assign]
    [item] = engine(stubs[0]).evaluate(PATTERNS[:1], DATA, "nll")
    assert all(loss != loss for loss in item.losses)


@pytest.mark.parametrize("flags", [("--admin-api-key", "secret"), ("--api-key=secret",)])
def test_keys_of_an_own_server_are_its_own(flags: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(own_server, "find_spec", lambda name: name)
    with (
        pytest.raises(SearchError, match="makes its own key"),
        own_server.own_server("model", flags, tmp_path / "log"),
    ):
        pass
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nnodes", "2", "--node-rank", "1"), "--node-rank 1 is given; expected a search on node 0, which says what"),
        (("--node-ra", "3"), "--node-rank 3 is given"),
        (("--nnodes=2",), "--nnodes 2 needs --dist-init-addr HOST:PORT, an address of this node"),
    ],
)
def test_a_search_begins_on_the_first_of_several_nodes(flags: tuple[str, ...], message: str) -> None:
    """On another one, or where the others can't find it, it would wait for an hour."""
    with pytest.raises(SearchError, match=f"^{message}"):
        own_server.check_arguments(("--tp", "16", *flags))


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        (("--tp", "8"), 1),
        (("--nnodes", "1", "--node-rank", "0"), 1),
        (("--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000"), 2),
        (("--nnodes=4", "--node-rank=0", "--dist-init=10.0.0.1:5000"), 4),
    ],
)
def test_of_how_many_nodes_a_server_is(flags: tuple[str, ...], nodes: int) -> None:
    assert own_server.check_arguments(flags) == nodes


def test_the_port_of_a_new_server_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = own_server.free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = other.getsockname()[1]
        monkeypatch.setattr(own_server, "_PORTS", range(taken, taken + 1))
        with pytest.raises(SearchError, match=f"No port of {taken} to {taken} is free"):
            own_server.free_port()
    assert 10000 <= free < 30000


@pytest.mark.parametrize("code", [502, *(pytest.param(item, marks=pytest.mark.slow) for item in (0, 500))])
def test_a_server_whose_status_answers_and_whose_work_fails_is_given_up(stubs: list[Stub], code: int) -> None:
    """Its patience counts from the first loss, in pauses that grow."""
    stubs[0].fail = lambda path: (code, {}) if path == "/generate" else None
    lines: list[str] = []
    with pytest.raises(SearchError, match="no server came back within 2 s"):
        list(engine(stubs[0], patience=2, notice=lines.append).evaluate(PATTERNS, DATA, "nll"))
    assert stubs[0].requests < 25 and len(lines) == 2


@pytest.mark.parametrize("sums", [(-1.0, 1.0, None), (1.0, 1.0, 0), ()])
def test_divergences_that_can_not_be(stubs: list[Stub], sums: Any) -> None:
    control = stubs[0].control

    def wrong(action: str, body: Any, rank: int) -> dict[str, Any]:
        found = control(action, body, rank)
        for rid, (_, _, count) in found.get("sums", {}).items():
            found["sums"][rid] = [count if value is None else value for value in sums] if sums else None
        return found

    stubs[0].control = wrong  # type: ignore[method-assign]
    with pytest.raises(SearchError, match=r"answers in another form|a divergence of -1\.0"):
        list(engine(stubs[0]).evaluate(PATTERNS[:1], DATA, "kl"))


def test_a_server_with_other_weights_is_refused(stubs: list[Stub]) -> None:
    stubs[1].weights_sha256 = "2" * 64
    with pytest.raises(SearchError, match="has other weights than"):
        engine(*stubs)


def test_weights_that_are_updated_under_a_search(stubs: list[Stub]) -> None:
    """What was measured meanwhile is not believed, and no results are written."""
    searching, generate = engine(stubs[0]), stubs[0].generate
    searching.check_unchanged()

    def updated(body: Any) -> Any:
        stubs[0].weights_sha256 = "2" * 64
        return generate(body)

    stubs[0].generate = updated  # type: ignore[method-assign]
    with pytest.raises(SearchError, match="has other weights than"):
        next(searching.evaluate(PATTERNS[:1], DATA, "nll"))
    with pytest.raises(SearchError, match="has other weights than"):
        searching.check_unchanged()


@pytest.mark.parametrize(
    ("answered", "sent", "same"),
    [
        ([5, 7, 9], [5, 7, 9], True),
        ([5, 0, 9, 0], [5, 511, 9, 511], True),  # SGLang's name for the last token of a vocabulary of 512
        ([0, 511], [5, 511], False),
        ([5, 7], [5, 7, 9], False),
        ([5, 8], [5, 9], False),
        ([], [], True),
    ],
)
def test_an_answer_is_about_the_tokens_that_were_sent(answered: list[int], sent: list[int], same: bool) -> None:
    assert same_tokens(answered, sent) is same
