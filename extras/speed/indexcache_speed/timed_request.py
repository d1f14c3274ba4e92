"""Timed requests to SGLang's `/generate`, in token ids, so that a server needs no tokenizer.

SGLang's own `bench_serving` is not used: it needs all of SGLang beside it, times one server a run, warms up with the
first prompt that it then times, and sees no token where a server sends ids without text. The definitions are its own,
and `scripts.bench.serving.speed` compares the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from indexcache_search.engines.answers import Answer
from indexcache_search.errors import SearchError
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import StatusError, encoded
from sglang_indexcache.http.events import events
from sglang_indexcache.io.fields import Count

OPENING = 16
"""First tokens of a prompt, which no other prompt has: nothing behind them is in a prefix cache."""
REQUEST_SECONDS = 3600.0
_PATH = "/generate"
_BYTES, _BYTES_A_TOKEN = 4 << 20, 32  # an event repeats all ids and text before it


class _Finish(Answer):
    type: str
    message: str = ""


class _Meta(Answer):
    completion_tokens: Count
    cached_tokens: Count = 0
    finish_reason: _Finish | None = None


class _Error(Answer):
    message: str


class _Event(Answer):
    meta_info: _Meta | None = None
    error: _Error | None = None


_EVENT: TypeAdapter[_Event] = TypeAdapter(_Event)


@dataclass(frozen=True)
class Timing:
    """Times of one request, in seconds after it was sent.

    Attributes:
        first: when its first token came.
        last: when its last token came.
        later: tokens that came after `first`.
    """

    first: float
    last: float
    later: int

    @property
    def token(self) -> float | None:
        """TPOT in seconds: of each token after the first; `None` if there was one alone."""
        return (self.last - self.first) / self.later if self.later else None


@dataclass(frozen=True)
class Burst:
    """Requests that were sent at once, and the seconds until the last token of all."""

    timings: tuple[Timing, ...]
    seconds: float


def send(
    address: Address,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    key: str | None = None,
    dp_rank: int | None = None,
) -> Burst:
    """Send prompts of token ids at once, each over a connection of its own, and time their tokens.

    Args:
        address: an SGLang server.
        prompts: token ids of each; the first `OPENING` must be its own.
        output_tokens: tokens to generate behind each, greedily and past the end of the text.
        key: sent as a bearer token; by default the content of `SGLANG_API_KEY`.
        dp_rank: the data-parallel rank to run on; by default the server's choice.

    Raises:
        ServerError: if the server does not answer.
        SearchError: if it is no SGLang, takes a prompt from its cache, or gives fewer tokens than requested.
    """
    requests = [_prepare(address, prompt, output_tokens, key, dp_rank) for prompt in prompts]
    with ThreadPoolExecutor(len(requests)) as pool:
        began = time.perf_counter()
        timings = tuple(pool.map(lambda request: request(), requests))
        return Burst(timings, time.perf_counter() - began)


def _prepare(
    address: Address, prompt: Sequence[int], count: int, key: str | None, dp_rank: int | None
) -> Callable[[], Timing]:
    """Write down a request, and return what sends it."""
    body: dict[str, Any] = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True},
        "stream": True,
    }
    if dp_rank is not None:
        body["routed_dp_rank"] = dp_rank
    content, limit = encoded(body), _BYTES + count * (count + 64) * _BYTES_A_TOKEN
    return lambda: _timed(address, content, limit, count, key)


def _timed(address: Address, content: bytes, limit: int, count: int, key: str | None) -> Timing:
    first, found, before = None, _Meta(completion_tokens=0), 0
    began = last = time.perf_counter()
    try:
        for data in events(address, _PATH, content, seconds=REQUEST_SECONDS, max_bytes=limit, key=key):
            now = time.perf_counter()
            meta = _read(address, data)
            if meta.completion_tokens > found.completion_tokens:
                last = now
                if first is None:
                    first, before = now, meta.completion_tokens
            found = meta
    except StatusError as error:
        if error.code == 404:
            raise SearchError(f"{address}: has no {_PATH}, expected an SGLang server") from None
        raise SearchError(error.whole) from None
    if first is None or found.completion_tokens != count:
        raise SearchError(f"{address}: gave {found.completion_tokens} tokens, expected the {count} requested")
    if found.cached_tokens >= OPENING:
        raise SearchError(f"{address}: took {found.cached_tokens} tokens of a new prompt from its cache, expected none")
    return Timing(first - began, last - began, count - before)


def _read(address: Address, data: bytes) -> _Meta:
    try:
        event = _EVENT.validate_json(data, strict=True)
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
        raise SearchError(f"{address}: {_PATH} streams another form: {where or 'no JSON'}") from None
    if event.error is not None:
        raise SearchError(f"{address}: {_PATH} answers: {event.error.message}")
    if event.meta_info is None:
        raise SearchError(f"{address}: {_PATH} streams another form: no meta_info")
    finish = event.meta_info.finish_reason
    if finish is not None and finish.type not in ("length", "stop"):
        raise SearchError(f"{address}: ended a request with {finish.type}: {finish.message}")
    return event.meta_info
