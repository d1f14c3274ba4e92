"""A pattern together with other features of SGLang on GPUs: answers of our server beside those of SGLang's own switch.

    python -m scripts.bench.serving.combinations --model /tmp/model --pattern FSSFSS --at-once 3 \
        --server-args "--load-format dummy --skip-tokenizer-init --page-size 64 ..." \
        plain= tp="--tp-size 2" mtp="--speculative-algorithm EAGLE ..."

Each cell is NAME=FLAGS. It starts three servers with these flags: ours with the pattern, SGLang's with its own switch,
and SGLang's with all indexers. They answer the same prompts one by one, some longer than a chunk, one behind a prefix
hit, and requests that are aborted among them. Tokens of the first two must be equal; the largest difference of logprobs
is printed, with what our server counted in its passes. Some versions ignore some spellings of the switch and say
nothing: a cell fails if SGLang's answers with the switch are no nearer to ours than to those with all indexers.

In NAME=FLAGS ++ MORE only our server has MORE; a pattern with blocks of queries, which SGLang has no switch for, is
compared with our server without MORE. A storm (`scripts.bench.serving.soak`) follows in the cells that `--storm` names.
The exit code is 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from indexcache_search.engines.own_server import free_port
from scripts.bench.serving.soak import Storm
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe, family_of

TIMEOUT = 300
CLOSE = 0.1  # nats by which logprobs may differ in a storm: bfloat16, in batches of other sizes
STEPS = 12
OURS, SWITCH, FULL = "ours", "sglang", "full"


@dataclass(frozen=True)
class Cell:
    """A feature to run: flags of both servers, and of ours alone."""

    name: str
    flags: tuple[str, ...]
    ours: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Cell:
        name, _, rest = text.partition("=")
        flags, _, ours = rest.partition(" ++ ")
        return cls(name, tuple(shlex.split(flags)), tuple(shlex.split(ours)))


@dataclass(frozen=True)
class Served:
    """What a server answered to one prompt."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int


class Bench:
    """Servers of one model and pattern.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.common = ("--model-path", options.model, *shlex.split(options.server_args))
        if options.pattern and "+" not in options.pattern:
            config = json.loads((Path(options.model) / "config.json").read_text())
            adapter = family_of(describe(config, options.model).architecture).sglang
            self.switch = adapter.to_overrides({}, Pattern.parse(options.pattern))
        rng = random.Random(3)  # noqa: S311
        longest = [rng.randrange(10, options.vocabulary) for _ in range(max(options.lengths))]
        self.prompts = [
            [rng.randrange(10, options.vocabulary) for _ in range(length)] for length in options.lengths[1:]
        ]
        self.prompts = [longest, *self.prompts, longest[: options.lengths[0] * 3 // 4] + self.prompts[-1][:40]]

    def run(self, cell: Cell) -> bool:
        """Compare the servers of `cell`; print a line, and return whether they agree."""
        pattern = self.options.pattern
        servers = [OURS, SWITCH, *([FULL] if "S" in pattern and "+" not in pattern else [])]
        try:
            with ThreadPoolExecutor(len(servers)) as pool:
                mine, theirs, *full = pool.map(lambda which: self._answers(cell, which), servers)
        except Exception as error:
            print(f"{cell.name}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            if not isinstance(error, (OSError, RuntimeError)):
                traceback.print_exc()
            return False
        (found, state, problems), (expected, _, _) = mine, theirs
        distance = Distance.of(found, expected)
        hits = [one.cached for one in found]
        counts = [item.get("counted") for item in state]
        print(
            f"{cell.name}: {len(found) - distance.prompts} of {len(found)} equal, logprobs differ by at most"
            f" {distance.largest:.2g}, in the mean {distance.mean:.2g}, cached {hits},"
            f" counted {json.dumps(counts)}, {len(problems)} problems{''.join(f'; {item}' for item in problems[:3])}",
            flush=True,
        )
        keys = ("proven", "pattern", "grouped", "sharded", "saved_kv_bytes_per_token", "saved_weight_bytes")
        print(f"    {json.dumps([{key: item[key] for key in keys if key in item} for item in state])}", flush=True)
        effective = True
        if full:
            away = Distance.of(expected, full[0][0])
            effective = distance < away
            verdict = "runs the pattern" if effective else "IGNORED: answers like all F"
            print(f"    SGLang's switch {verdict}: from all F {away}; from ours {distance}", flush=True)
        proven = bool(state) == bool(pattern) and all(item["proven"] for item in state)
        return distance.prompts == 0 and effective and not problems and proven

    def _answers(self, cell: Cell, which: str) -> tuple[list[Served], list[Any], list[str]]:
        pattern = self.options.pattern
        own = list(cell.ours) if which == OURS else []
        if which == OURS or "+" in pattern:
            module = "sglang_indexcache.launch_server"
            own += ["--indexcache-pattern", pattern] if pattern else []
        else:
            module = "sglang.launch_server"
            own += ["--json-model-override-args", json.dumps(self.switch)] if pattern and which == SWITCH else []
        log = self.options.logs / f"{cell.name}.{which}.log"
        with self._running(("-m", module, *own, *self.common, *cell.flags), log) as (url, pid):
            found = [self._ask(url, prompt, f"{number}") for number, prompt in enumerate(self.prompts[:-1])]
            self._abort(url)
            found.append(self._ask(url, self.prompts[-1], "last"))
            problems: list[str] = []
            if cell.name in self.options.storm and which != FULL:
                storm = Storm(url, self.options.vocabulary, self.options.longest, self.options.context, close=CLOSE)
                storm.run(self.options.requests, 64, pid)
                problems = storm.problems
                memory = [f"{storm.memory[place] / 1e6:.0f}" for place in (len(storm.memory) // 4, -1)]
                counts, text = dict(storm.counts), f"{len(problems)} problems, {' and '.join(memory)} MB"
                print(f"{cell.name}, {which}: storm {counts}, {text} at a quarter and at the end", flush=True)
            states = json.loads(_get(url, "/server_info"))["internal_states"]
        return found, [item["indexcache"] for item in states if "indexcache" in item], problems

    def _ask(self, url: str, prompt: Sequence[int], name: str, steps: int = STEPS) -> Served:
        body = {
            "input_ids": prompt,
            "rid": f"asked-{name}",
            "sampling_params": {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True},
            "return_logprob": True,
            **({"logprob_start_len": 0} if self.options.inputs else {}),
            **self.options.request,
        }
        answer = _post(url, "/generate", body)
        meta = answer["meta_info"]
        inputs = [entry[0] for entry in meta.get("input_token_logprobs", ())[1:]]
        outputs = [entry[0] for entry in meta["output_token_logprobs"]]
        return Served(tuple(answer["output_ids"]), (*inputs, *outputs), meta["cached_tokens"])

    def _abort(self, url: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._ask, url, self.prompts[0], "aborted", 4000)
            while not asked.done():
                time.sleep(0.3)
                _post(url, "/abort_request", {"rid": "asked-aborted"}, read=False)

    @contextmanager
    def _running(self, arguments: Sequence[str], log: Path) -> Iterator[tuple[str, int]]:
        port = free_port()
        line = [sys.executable, *arguments, "--port", str(port)]
        with log.open("w") as output:
            process = subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + self.options.start
        try:
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    lines = [item for item in log.read_text(errors="replace").splitlines() if item.strip()]
                    raise RuntimeError(f"{log.name}: no server ({process.poll()}): {' | '.join(lines[-3:])}")
                try:
                    _get(url, "/health_generate")
                    break
                except OSError:
                    time.sleep(0.5)
            yield url, process.pid
        finally:
            subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
            process.kill()
            process.wait()


@dataclass(frozen=True, order=True)
class Distance:
    """How far the answers of two servers are apart; the smaller one is nearer.

    Attributes:
        prompts: number of those that have other tokens.
        largest: difference of logprobs, in nats, up to the first token that differs.
        mean: of these differences.
    """

    prompts: int
    largest: float
    mean: float

    @classmethod
    def of(cls, one: Sequence[Served], other: Sequence[Served]) -> Distance:
        differences = [0.0]
        for left, right in zip(one, other, strict=True):
            same = next(
                (at for at, (a, b) in enumerate(zip(left.ids, right.ids, strict=False)) if a != b), len(left.ids)
            )
            pairs = list(zip(left.logprobs, right.logprobs, strict=False))
            differences += [abs(a - b) for a, b in pairs[: len(left.logprobs) - len(left.ids) + same]]
        prompts = sum(left.ids != right.ids for left, right in zip(one, other, strict=True))
        return cls(prompts, max(differences), sum(differences) / len(differences))

    def __str__(self) -> str:
        return f"{self.prompts} other answers, {self.largest:.2g} nats"


def _get(url: str, path: str) -> str:
    with urlopen(url + path, timeout=TIMEOUT) as answer:  # noqa: S310
        return str(answer.read().decode())


def _post(url: str, path: str, body: Any, read: bool = True) -> Any:
    request = Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310
        return json.loads(answer.read()) if read else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="NAME=FLAGS [++ FLAGS OF OURS]")
    parser.add_argument("--model", required=True)
    parser.add_argument("--pattern", default="", help="letters; without them our server has none, either")
    parser.add_argument("--server-args", default="")
    parser.add_argument("--lengths", type=lambda text: [*map(int, text.split(","))], default=[9000, 40, 3000])
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--inputs", action="store_true", help="compare logprobs of prompts, too; no prefix is reused")
    parser.add_argument("--request", type=json.loads, default={}, help="more members of every request, JSON")
    parser.add_argument("--at-once", type=int, default=3, help="cells")
    parser.add_argument("--start", type=float, default=240, help="seconds that a server may take to start")
    parser.add_argument("--storm", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=6000, help="tokens of the storm's longest prompt")
    parser.add_argument("--context", type=int, default=32768, help="the server's context length")
    parser.add_argument("--logs", type=Path, required=True, help="folder of the servers' logs")
    options = parser.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    with ThreadPoolExecutor(options.at_once) as pool:
        fine = list(pool.map(bench.run, map(Cell.parse, options.cells)))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
