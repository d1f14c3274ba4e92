"""A storm of requests on a running server with a pattern: no error of ours, answers as if each was alone, flat memory.

    python -m scripts.bench.serving.soak --url http://localhost:30000 --requests 1000 --at-once 64 --pid 4711

First some prompts are asked one by one. Then they come again among others, many at once: of mixed lengths, aborted,
disconnected, malformed, too long, and with flushes of the cache. In the end their answers are compared, memory of the
server's processes (`--pid` and its children) at a quarter of the requests and at the end, and metrics where they are
on: every pass runs as many indexers as there are F layers. The server must have been started with
`--skip-tokenizer-init`, or take `input_ids`. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import psutil

KINDS = {"compared": 60, "other": 14, "aborted": 8, "disconnected": 8, "malformed": 5, "too long": 3, "flush": 2}
TIMEOUT = 600
STEPS = 8
CLOSE = 1e-3  # of logprobs, in nats; of float32


@dataclass
class Storm:
    """The requests of one run, and what came back.

    Args:
        url: of the server.
        vocabulary: token ids are below.
        longest: tokens of the longest prompt.
        context: tokens that no request may have.
        seed: of prompts, and of their order.
        close: how much logprobs may differ, in nats; batches of other sizes are rounded otherwise.
    """

    url: str
    vocabulary: int
    longest: int
    context: int
    seed: int = 0
    close: float = CLOSE
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)  # noqa: S311
        lengths = [rng.choice([rng.randrange(2, 40), rng.randrange(40, self.longest)]) for _ in range(40)]
        self.prompts = [self._prompt(rng, length) for length in lengths]
        for number in range(0, len(self.prompts), 4):  # prefixes in common
            self.prompts[number] = self.prompts[number - 1][:30] + self.prompts[number]
        self.alone: list[tuple[list[int], list[float]]] = []

    def run(self, requests: int, at_once: int, pid: int | None = None) -> None:
        """Ask the prompts alone, then storm, then compare."""
        self.alone = [self._ask(prompt, f"alone-{number}") for number, prompt in enumerate(self.prompts)]
        kinds = random.Random(self.seed + 1).choices([*KINDS], [*KINDS.values()], k=requests)  # noqa: S311
        began, done = time.monotonic(), 0
        with ThreadPoolExecutor(at_once) as pool:
            for _ in pool.map(self._one, range(requests), kinds):
                done += 1
                if done % max(1, requests // 20) == 0:
                    self.memory.append(_resident(pid))
                    print(f"{done}/{requests} in {time.monotonic() - began:.0f} s, {self.memory[-1] / 1e6:.0f} MB")
        self._compare_again()
        self._check_metrics()

    def _one(self, number: int, kind: str) -> None:
        do: dict[str, Callable[[random.Random, str], None]] = {
            "compared": self._compared,
            "other": self._other,
            "aborted": self._aborted,
            "disconnected": self._disconnected,
            "malformed": self._malformed,
            "too long": self._too_long,
            "flush": self._flush,
        }
        try:
            do[kind](random.Random(f"{self.seed}-{number}"), f"{kind.replace(' ', '-')}-{number}")  # noqa: S311
            self.counts[kind] += 1
        except Exception as error:
            self.problems.append(f"{kind} {number}: {type(error).__name__}: {str(error)[:200]}")

    def _compared(self, rng: random.Random, name: str) -> None:
        number = rng.randrange(len(self.prompts))
        self._same(number, self._ask(self.prompts[number], name), name)

    def _same(self, number: int, found: tuple[list[int], list[float]], name: str) -> None:
        """Compare tokens; where two are as likely, the first that differs may."""
        (ids, logprobs), (wanted, expected) = found, self.alone[number]
        same = next((at for at, (one, two) in enumerate(zip(ids, wanted, strict=True)) if one != two), len(ids))
        for at in range(min(same + 1, len(ids))):
            if abs(logprobs[at] - expected[at]) > self.close:
                self.problems.append(f"{name}: token {at} of prompt {number}: {logprobs[at]} for {expected[at]}")
                return
        self.counts["ties"] += same < len(ids)

    def _other(self, rng: random.Random, name: str) -> None:
        ids, _ = self._ask(self._prompt(rng, rng.randrange(1, self.longest)), name)
        if len(ids) != STEPS:
            self.problems.append(f"{name}: {len(ids)} tokens")

    def _aborted(self, rng: random.Random, name: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._ask, self._prompt(rng, rng.randrange(10, self.longest)), name, 400)
            while not asked.done():
                time.sleep(rng.random() / 4)
                self._send("/abort_request", {"rid": name})

    def _disconnected(self, rng: random.Random, name: str) -> None:
        place = urlsplit(self.url)
        body = json.dumps(self._body(self._prompt(rng, rng.randrange(10, self.longest)), name, 400) | {"stream": True})
        head = f"POST /generate HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((str(place.hostname), int(place.port or 80)), TIMEOUT) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            connection.settimeout(2 * rng.random() + 0.01)
            with suppress(TimeoutError):
                connection.recv(200)

    def _malformed(self, rng: random.Random, name: str) -> None:
        wrong: Sequence[Any] = (
            b"{",
            {"input_ids": "words", "rid": name},
            {"input_ids": [[1.5]], "rid": name},
            {"input_ids": [3], "rid": name, "sampling_params": {"temperature": -1}},
            {"input_ids": [3], "rid": name, "sampling_params": {"max_new_tokens": "many"}},
            {"rid": name},
        )
        self._refused(rng.choice(wrong), name)

    def _too_long(self, rng: random.Random, name: str) -> None:
        self._refused(self._body(self._prompt(rng, self.context + 10), name, STEPS), name)

    def _refused(self, body: Any, name: str) -> None:
        try:
            answer = self._send("/generate", body)
        except HTTPError as error:
            if error.code > 500:  # 500 is what SGLang answers to some bodies
                raise
            return
        self.problems.append(f"{name}: answered {answer[:100]!r}, expected an error")

    def _flush(self, rng: random.Random, name: str) -> None:
        try:
            self._send("/flush_cache", {})
        except HTTPError as error:
            if error.code != 400:  # while requests run
                raise

    def _compare_again(self) -> None:
        """Ask the prompts once more, alone again."""
        for number, prompt in enumerate(self.prompts):
            self._same(number, self._ask(prompt, f"after-{number}"), f"after-{number}")

    def _check_metrics(self) -> None:
        for state in json.loads(self._get("/server_info"))["internal_states"]:
            own = state.get("indexcache")  # SGLang by itself has none
            if own is None:
                return
            if not own["proven"] or own["counted"].get("to_come"):
                self.problems.append(f"/server_info: {own}")
        try:
            text = self._get("/metrics")
        except HTTPError:
            return
        for found in re.findall(r"^sglang:indexcache_indexer_runs_total(\{.*\}) (\S+)$", text, re.MULTILINE):
            labels, runs = found
            skips = re.search(rf"^sglang:indexcache_indexer_skips_total{re.escape(labels)} (\S+)$", text, re.MULTILINE)
            wanted = own["shared_layers"] / own["full_layers"]
            if skips is None or float(skips[1]) != float(runs) * wanted or float(runs) == 0:
                self.problems.append(f"/metrics: {runs} runs and {skips and skips[1]} skips, expected 1 to {wanted}")

    def _prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(2, self.vocabulary) for _ in range(length)]

    def _body(self, prompt: list[int], name: str, steps: int) -> dict[str, Any]:
        parameters = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
        return {"input_ids": prompt, "rid": name, "sampling_params": parameters, "return_logprob": True}

    def _ask(self, prompt: list[int], name: str, steps: int = STEPS) -> tuple[list[int], list[float]]:
        answer = json.loads(self._send("/generate", self._body(prompt, name, steps)))
        return answer["output_ids"], [entry[0] for entry in answer["meta_info"].get("output_token_logprobs", ())]

    def _send(self, path: str, body: Any) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = Request(self.url + path, data, {"content-type": "application/json"})  # noqa: S310
        with urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310
            content: bytes = answer.read()
        return content

    def _get(self, path: str) -> str:
        with urlopen(self.url + path, timeout=TIMEOUT) as answer:  # noqa: S310
            return str(answer.read().decode())


def _resident(pid: int | None) -> int:
    """Return the bytes in memory of a process and its children."""
    if pid is None:
        return 0
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt")
    parser.add_argument("--context", type=int, default=4096, help="the server's context length")
    parser.add_argument("--pid", type=int, help="of the server, to watch its memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--close", type=float, default=CLOSE, help="how much logprobs may differ, in nats")
    options = parser.parse_args()
    storm = Storm(options.url, options.vocabulary, options.longest, options.context, options.seed, options.close)
    storm.run(options.requests, options.at_once, options.pid)
    quarter, end = (storm.memory[place] / 1e6 for place in (len(storm.memory) // 4, -1))
    print(f"{dict(storm.counts)}; {quarter:.0f} MB at a quarter, {end:.0f} at the end; {len(storm.problems)} problems")
    for problem in storm.problems[:20]:
        print(f"problem: {problem}")
    return 1 if storm.problems else 0


if __name__ == "__main__":
    sys.exit(main())
