"""Answers of servers, right and mutated: refused in one line, or as right as what was asked for."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import httpcore
import numpy as np
import pytest
from pydantic import TypeAdapter

from indexcache_search.engines.answers import Rank
from indexcache_search.engines.calibration_client import CalibrationServer, ServerLostError
from indexcache_search.engines.lease import HeldLease
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import SearchError
from indexcache_search.eval.endpoints import Endpoint
from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.calibration import protocol
from sglang_indexcache.families import describe
from sglang_indexcache.http import client, served_table, servers
from sglang_indexcache.http.client import NoAnswerError, ServerError, StatusError, ask
from sglang_indexcache.io.messages import BUSY
from tests.conftest import tiny_config

ANY: TypeAdapter[Any] = TypeAdapter(Any)
PROMPT = [5, 7, 11, 13, 17]
PATTERN = Pattern("FSSFSS")
LAYERS = 6
RANK = {
    "protocol": protocol.VERSION,
    "boot": "b" * 32,
    "switches": 3,
    "dp_rank": 0,
    "pattern": PATTERN.roles,
    "fingerprint": PATTERN.fingerprint,
    "config_sha256": "0" * 64,
    "weights_sha256": "1" * 64,
    "versions": {"sglang": "0.5.23", "torch": "2.13.0", "dtype": "bfloat16", "chunk": "8192"},
    "measures": ["kl", "overlap"],
}
TOKENS = [[None, 5, None], [-1.5, 7, "a"], [-0.25, 11, None], [0.0, 13, None], [-7.0, 17, None]]
BEST: list[Any] = [None, [[-1.0, 3, None]], [[-0.25, 11, None]], [[0.0, 13, None]], [[-0.1, 9, None]]]
GENERATED = [{"meta_info": {"input_token_logprobs": TOKENS, "input_top_logprobs": BEST}}]
COMPLETION = {
    "choices": [
        {
            "text": "abcdef",
            "logprobs": {
                "tokens": list("abcdef"),
                "token_logprobs": [None, -1.5, -0.25, 0.0, -7.0, -1.0],
                "top_logprobs": [None, {"x": -1.0}, {"c": -0.25}, {"d": 0.0}, {"y": -0.1}, {"f": -1.0}],
            },
        }
    ],
    "usage": {"prompt_tokens": 5, "completion_tokens": 1},
}
OVERLAP = np.eye(LAYERS) * 0.5 + 0.5


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes whatever is asked answer with some bytes."""

    def answer(content: bytes, code: int = 200, headers: str = "Content-Type: application/json") -> None:
        head = f"HTTP/1.1 {code} X\r\n{headers}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        backend = httpcore.MockBackend([head, content] if content else [head])
        monkeypatch.setattr(client, "connections", lambda *_: httpcore.ConnectionPool(network_backend=backend))

    return answer


def ranks(**more: Any) -> dict[str, Any]:
    return {"ranks": [{**RANK, **more}]}


class Held(HeldLease):
    """A lease that needs no server."""

    def __init__(self) -> None: ...

    token, held = "its", True  # type: ignore[assignment]

    def lost(self) -> None: ...

    def release(self) -> None: ...  # type: ignore[override]


def server() -> CalibrationServer:
    """A client that has switched to `PATTERN`, and asks nobody for its lease."""
    client = CalibrationServer("http://host:1", lease=Held())
    client._switched = {0: Rank.model_validate(RANK)}
    return client


def sane_logprobs(found: list[tuple[float, bool]]) -> bool:
    return len(found) == 4 and all(
        type(value) is float and not value > 1e-3 and not math.isinf(value) and type(hit) is bool
        for value, hit in found
    )


def sane_sums(found: dict[str, tuple[float, float, int]]) -> bool:
    total, squares, count = found["a"]
    return set(found) == {"a"} and count == 5 and not total < -1e-3 and not squares < 0 and not math.isinf(total)


def sane_overlap(found: tuple[list[list[float]], int]) -> bool:
    values = np.asarray(found[0])
    fair = values.shape == (LAYERS, LAYERS) and bool((np.abs(values - 0.5) <= 0.500001).all())
    return fair and bool((np.abs(values - values.T) < 1e-5).all()) and type(found[1]) is int


KINDS: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], bool]]] = {
    "status": (ranks(), lambda: server().status(), lambda rank: Pattern(rank.pattern).fingerprint == rank.fingerprint),
    "lanes": (
        {"ranks": [RANK, {**RANK, "dp_rank": 1}]},
        lambda: server().lanes(),
        lambda lanes: len({lane.dp_rank for lane in lanes}) == len(lanes),
    ),
    "switch": (ranks(), lambda: server().switch(PATTERN), lambda none: none is None),
    "generate": (GENERATED, lambda: server().logprobs([PROMPT], 1)[0], sane_logprobs),
    "baseline": (
        ranks(missing=[0, 2]),
        lambda: server().missing_baselines("data", [(0, 4)] * 3),
        lambda rows: set(rows) <= {0, 1, 2} and rows == sorted(set(rows)),
    ),
    "kl": (ranks(sums={"a": [2.5, 1.5, 5]}), lambda: server().divergences({"a": [(2, 7)]}), sane_sums),
    "overlap": (
        ranks(overlap=OVERLAP.tolist(), queries=12),
        lambda: server().index_overlap(LAYERS),
        sane_overlap,
    ),
    "models": ({"data": [{"id": "m"}]}, lambda: Endpoint("http://host:1").model, lambda name: isinstance(name, str)),
    "prompt": (COMPLETION, lambda: endpoint().logprobs(PROMPT), sane_logprobs),
    "text": (COMPLETION, lambda: endpoint().generate(PROMPT, 1), lambda text: isinstance(text, str)),
    "server_info": (
        {
            "internal_states": [
                {"indexcache": {"fingerprint": "a" * 64, "proven": False, "since": "2026", "reason": "x"}},
                {},
            ]
        },
        lambda: servers.ranks("http://host:1"),
        lambda found: (
            all("\n" not in str(rank.problem(Pattern("FS"))) for rank in found)
            and len(served_table.as_text(found).splitlines()) == 1 + len(found) + len(served_table.differing(found))
        ),
    ),
}


def endpoint() -> Endpoint:
    found = Endpoint("http://host:1")
    found.__dict__["model"] = "m"
    return found


ODD = [None, -1, 0, 2, 10**9, 10**30, 1e300, -1e-9, 0.5, "", "1", "F", True, False, [], {}, [[]], [1.0], "é\n\x1b"]


def mutated(content: Any, rng: random.Random) -> Any:
    """`content` with something else at one to three places."""
    whole = [copy.deepcopy(content)]
    for _ in range(rng.randint(1, 3)):
        place: Any = whole
        key: Any = 0
        while isinstance(place[key], dict | list) and place[key] and rng.random() < 0.9:
            place = place[key]
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        match rng.randrange(6):
            case 0 if place is not whole:
                del place[key]
            case 1 if isinstance(place, list) and place is not whole:
                place.insert(key, copy.deepcopy(place[rng.randrange(len(place))]))
            case 2 if type(place[key]) in (int, float):
                place[key] *= rng.choice([-1, 2, 1 + 1e-4, 10**6])
            case _:
                place[key] = copy.deepcopy(rng.choice(ODD))
    return whole[0]


def spoilt(text: bytes, rng: random.Random) -> bytes:
    """JSON that is none, or that says two things."""
    match rng.randrange(6):
        case 0:
            return text[: rng.randrange(len(text))]
        case 1:
            return text.replace(b"-1.5", rng.choice([b"NaN", b"-Infinity", b"1e999", b"-1" * 5000]))
        case 2:
            return b"[" * 5000 + text
        case 3:
            return text + rng.choice([b"{}", b"x", b"\x00", b","])
        case 4:
            return text.replace(b'"', b"\xff", 1)
        case _:
            return text[:-1] + b", " + text[1:] if text.startswith(b"{") else text[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_four_hundred_answers_of_each_kind(kind: str, answering: Callable[..., None]) -> None:
    right, call, sane = KINDS[kind]
    answering(json.dumps(right).encode())
    assert sane(call())
    rng, refused = random.Random(f"answers {kind}"), 0
    for number in range(400):
        text = json.dumps(mutated(right, rng)).encode()
        text = spoilt(text, rng) if number % 5 == 0 else text
        answering(text)
        try:
            found = call()
        except (IndexCacheError, ServerLostError) as error:
            refused += 1
            assert str(error).isprintable() and str(error).startswith("http://host:1: "), text
        else:
            assert sane(found), text
    assert refused > 100


WRONG: list[tuple[str, Any, str]] = [
    ("status", {"ranks": [{**RANK, "versions": {"sglang": "0.5.23"}}]}, "has no version of torch"),
    ("status", {"ranks": [{**RANK, "versions": {"torch": "2.13", "sglang": "x\ny"}}]}, "ranks.0.versions.sglang"),
    ("status", ranks(pattern="FFFFFF"), "the fingerprint is not that of the pattern"),
    ("status", ranks(dp_rank="0"), "ranks.0.dp_rank: Input should be a valid integer"),
    ("status", ranks(dp_rank=True), "ranks.0.dp_rank: Input should be a valid integer"),
    ("lanes", {"ranks": [RANK, RANK]}, "a data-parallel rank answers twice"),
    ("baseline", ranks(missing=[3]), "lacks sequence 3 of 3"),
    ("kl", ranks(sums={"a": [2.5, 1.5, 5], "b": [2.5, 1.5, 5]}), "divergences of 2 requests, expected those of 1"),
    ("kl", ranks(sums={"b": [2.5, 1.5, 5]}), "gave a|expected those of 1"),
    ("kl", ranks(sums={"a": [2.5, 1.5, 4]}), "over 4 tokens, expected 5"),
    ("kl", ranks(sums={"a": [250.0, 1.5, 5]}), "whose squares sum up to 1.5"),
    ("kl", ranks(sums={"a": [1.0, -1.5, 5]}), "whose squares sum up to -1.5"),
    ("overlap", ranks(overlap=[[1.0]], queries=12), "gave no overlap of all 6 layers"),
    ("overlap", ranks(overlap=(OVERLAP * 2).tolist(), queries=12), "an overlap that is none"),
    ("overlap", ranks(overlap=(OVERLAP * 0).tolist(), queries=12), "an overlap that is none"),
    ("overlap", ranks(overlap=np.tril(OVERLAP).tolist(), queries=12), "an overlap that is none"),
    ("generate", [*GENERATED, *GENERATED], "gave 2 answers to 1 sequences"),
    (
        "generate",
        [{"meta_info": {"input_token_logprobs": TOKENS, "input_top_logprobs": BEST[:1] + BEST[:0:-1]}}],
        "likel",
    ),
    ("models", {"data": [{"id": 5}]}, "data.0.id: Input should be a valid string"),
]


@pytest.mark.parametrize(
    ("kind", "answer", "message"), WRONG, ids=[f"{kind}-{at}" for at, (kind, _, _) in enumerate(WRONG)]
)
def test_answers_that_can_not_be(kind: str, answer: Any, message: str, answering: Callable[..., None]) -> None:
    answering(json.dumps(answer).encode())
    with pytest.raises(IndexCacheError, match=message):
        KINDS[kind][1]()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("choices", 0, "logprobs"), None, "gives no logprobs of a prompt"),
        (("choices", 0, "logprobs", "token_logprobs"), [None, -1.0], "gives no logprobs of a prompt"),
        (("choices", 0, "logprobs", "tokens"), ["a"], "gives no logprobs of a prompt"),
        (("choices", 0, "logprobs", "token_logprobs", 2), None, "gives no logprobs of a prompt"),
        (("choices", 0, "logprobs", "token_logprobs", 2), 0.5, "should be less than or equal to 0.001"),
        (("choices", 0, "logprobs", "token_logprobs", 2), "-1", "Input should be a valid number"),
        (("choices", 0, "logprobs", "token_logprobs", 1), -0.5, "likelier than the likeliest"),
        (("usage", "prompt_tokens"), 6, "read 6 tokens, expected the 5 that were sent"),
        (("choices",), COMPLETION["choices"] * 2, "choices: List should have at most 1 item"),
    ],
)
def test_completions_that_can_not_be(
    place: tuple[Any, ...], value: Any, message: str, answering: Callable[..., None]
) -> None:
    answer: Any = copy.deepcopy(COMPLETION)
    inner = answer
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    answering(json.dumps(answer).encode())
    with pytest.raises(IndexCacheError, match=message):
        endpoint().logprobs(PROMPT)


@pytest.mark.parametrize(
    ("content", "code", "headers", "kind", "message"),
    [
        (b"<html>", 200, "Content-Type: text/html; charset=utf-8", ServerError, "found text/html, expected JSON"),
        (b'{"a": 1, "a": 2}', 200, "X: y", ServerError, "a key stands there twice"),
        (b'{"a": NaN}', 200, "X: y", ServerError, "NaN is no JSON"),
        (b"[" * 100_000, 200, "X: y", ServerError, "answers in another form"),
        (b"\xff\xfe[\x00", 200, "X: y", ServerError, "answers in another form"),
        (b"", 200, "X: y", ServerError, "answers in another form"),
        (b"{}", 409, "X: y", StatusError, "/x answers 409"),
        (b"{}", 307, "Location: http://other/", StatusError, "redirects are not followed"),
        (b"{}", 200, "Content-Length: 9", NoAnswerError, "can't be read"),
        (b"{}", 200, "no header", NoAnswerError, "can't be read"),
    ],
)
def test_answers_that_are_none(
    content: bytes, code: int, headers: str, kind: type[Exception], message: str, answering: Callable[..., None]
) -> None:
    answering(content, code, headers)
    with pytest.raises(kind, match=message) as caught:
        ask("http://host:1", "/x", ANY)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("content", "end"), [(b"", "answers 404"), (b"no such path", "answers 404: no such path")])
def test_an_error_without_an_explanation_ends_without_a_colon(
    content: bytes, end: str, answering: Callable[..., None]
) -> None:
    answering(content, 404, "X: y")
    with pytest.raises(SearchError, match=f"{end}$"):
        endpoint().logprobs(PROMPT)


def test_it_asks_in_a_running_event_loop(answering: Callable[..., None]) -> None:
    """As in a notebook."""
    answering(b"[1]")

    async def cell() -> Any:
        return ask("http://host:1", "/x", ANY)

    assert asyncio.run(cell()) == [1]


def test_a_key_that_no_header_may_hold_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("hunter22\n", "hünter22", " hunter22", "hunter22\x00"):
        with pytest.raises(ServerError, match="the key holds what no header may") as caught:
            ask("http://host:1", "/x", ANY, key=key)
        assert "22" not in str(caught.value)


def test_a_proxy_that_refuses_says_nothing_of_the_key(
    answering: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    answering(b"", 403)
    with pytest.raises(ServerLostError, match=r"the proxy http://127\.0\.0\.1:9 of HTTP_PROXY answers 403"):
        server().status()
    with pytest.raises(IndexCacheError, match=r"the proxy http://127\.0\.0\.1:9 of HTTP_PROXY answers 403"):
        endpoint().generate(PROMPT, 1)


@pytest.mark.parametrize("action", ["status", "baseline", "kl", "overlap"])
def test_a_server_that_is_busy_is_lost_for_a_while(action: str, answering: Callable[..., None]) -> None:
    answering(b'{"error": "busy: requests are running"}', 409)
    with pytest.raises(ServerLostError, match=rf"http://host:1: .*{BUSY}"):
        KINDS[action][1]()


def test_a_server_that_is_busy_at_the_start_is_one_line(answering: Callable[..., None]) -> None:
    answering(b'{"error": "busy"}', 409)
    with pytest.raises(SearchError, match="busy"):
        SglangEngine([server()], describe(tiny_config(), "tiny"))
