"""Sends the sessions of a workload to a server at their times, and notes when tokens come.

SGLang's `bench_serving` is not the client, since of 0.5.23's none of these can be had: turns of token ids (its turns
are chats, which need the server's tokenizer), lengths and times of arrival that are given, tokens of a server without a
tokenizer (it counts events with text), and a request that got fewer tokens than asked for as a failed one. Times mean
what they mean there; `tests/live/test_traffic.py` compares goodput with its own.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from scripts.bench.serving.engines import Limit
from scripts.bench.serving.workload import Session, Turn

REQUEST_SECONDS = 600.0  # in which a server says nothing


class FailedError(Exception):
    """A request whose answer is not what was asked for."""


@dataclass(frozen=True)
class Outcome:
    """One request.

    Attributes:
        sent: seconds after the beginning of the run.
        new: tokens of the prompt that no request before had.
        prompt: all tokens of the prompt.
        first: seconds to the first token (TTFT).
        latency: seconds to the last one.
        later: tokens that came after the first ones.
        output: tokens that were generated.
        cached: tokens of the prompt that the server took from its cache.
        error: why it failed; `None` if it did not.
    """

    sent: float
    new: int
    prompt: int
    first: float = 0.0
    latency: float = 0.0
    later: int = 0
    output: int = 0
    cached: int = 0
    error: str | None = None

    @property
    def token(self) -> float:
        """Seconds of each token after the first ones (TPOT); 0 if there is one alone, as in SGLang."""
        return (self.latency - self.first) / self.later if self.later else 0.0


def replay(url: str, sessions: Sequence[Session], limit: Limit) -> tuple[list[Outcome], float]:
    """Run all sessions at once, each with its own times.

    Returns:
        An outcome for each turn, also of those that could not be sent, and the seconds until the last one ended.
    """
    stop, found = threading.Event(), [list[Outcome]() for _ in sessions]
    texts = [written(session.prefix) for session in sessions]  # not while others are timed
    began = time.perf_counter()
    threads = [
        threading.Thread(target=_run, args=(url, session, text, outcomes, began, stop), daemon=True)
        for session, text, outcomes in zip(sessions, texts, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not limit.over():
        time.sleep(0.01)
    stop.set()
    seconds = time.perf_counter() - began
    for thread in threads:
        thread.join(5)
    return [outcome for outcomes in found for outcome in outcomes], seconds


def _run(url: str, session: Session, text: bytes, outcomes: list[Outcome], began: float, stop: threading.Event) -> None:
    length, error, before = len(session.prefix), None, began
    for turn in session.turns:
        length += len(turn.new)
        if error is None and stop.wait(max(0.0, before + turn.wait - time.perf_counter())):
            error = "the time was over"
        sent = time.perf_counter() - began
        if error is not None:
            outcomes.append(Outcome(sent, len(turn.new), length, error=f"not sent: {error}"))
            continue
        text = text + b"," * bool(text) + written(turn.new)
        try:
            outcome, ids = ask(url, text, length, turn, sent, stop)
        except (FailedError, OSError, http.client.HTTPException) as problem:
            error = f"{type(problem).__name__}: {problem}"[:300]
            outcome, ids = Outcome(sent, len(turn.new), length, error=error), []
        outcomes.append(outcome)
        text, length, before = text + b"," + written(ids), length + len(ids), time.perf_counter()


def ask(
    url: str, text: bytes, length: int, turn: Turn, sent: float = 0.0, stop: threading.Event | None = None
) -> tuple[Outcome, list[int]]:
    """Send one request; return how it went, and the ids that were generated.

    Args:
        url: of the server.
        text: ids of the prompt, as JSON has them between its brackets.
        length: of the prompt.
        turn: what is new in it, and how many tokens to generate.
        sent: for the outcome.
        stop: ends the request once it is set.

    Raises:
        FailedError: if the server does not give the tokens that were asked for, one event after the other.
        OSError: if there is no connection, or nothing comes any more.
        HTTPException: if the answer ends before its end.
    """
    parameters = {"temperature": 0, "max_new_tokens": turn.output, "ignore_eos": True}
    body = b'{"stream":true,"sampling_params":' + json.dumps(parameters).encode() + b',"input_ids":[' + text + b"]}"
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=REQUEST_SECONDS)
    ids: list[int] = []
    count, cached, before, first, last, done = 0, 0, 0, None, 0.0, False
    began = time.perf_counter()
    try:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise FailedError(f"{response.status}: {response.read(300).decode(errors='replace')}")
        for line in response:
            now = time.perf_counter() - began
            if stop is not None and stop.is_set():
                raise FailedError("the time was over")
            if not line.startswith(b"data:"):
                continue
            if (data := line[5:].strip()) == b"[DONE]":
                done = True
                break
            given, meta = _event(data)
            ids = ids + given if meta["completion_tokens"] == len(ids) + len(given) else given  # or all of them again
            cached = meta.get("cached_tokens", 0)
            if meta["completion_tokens"] > count:
                count, last = meta["completion_tokens"], now
                if first is None:
                    first, before = now, count
    finally:
        connection.close()
    if not done or first is None or not turn.output == count == len(ids):
        ended = "" if done else ", and no end"
        raise FailedError(f"says {count} tokens, sent {len(ids)}, expected {turn.output}{ended}")
    if count > 1 and count == before:
        raise FailedError(f"all {count} tokens came at once, expected a stream")
    return Outcome(sent, len(turn.new), length, first, last, count - before, count, cached), ids


def _event(data: bytes) -> tuple[list[int], dict[str, Any]]:
    try:
        event = json.loads(data)
        if "error" in event:
            raise FailedError(str(event["error"])[:300])
        ids, meta = event["output_ids"], event["meta_info"]
        if not (isinstance(ids, list) and isinstance(meta["completion_tokens"], int)):
            raise TypeError("output_ids")
    except (ValueError, KeyError, TypeError) as error:
        raise FailedError(f"streams another form: {error}: {data[:100].decode(errors='replace')}") from None
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise FailedError(f"aborted: {reason.get('message', '')}")
    return ids, meta


def written(ids: Sequence[int]) -> bytes:
    """Return ids as JSON has them between its brackets."""
    return ",".join(map(str, ids)).encode()
