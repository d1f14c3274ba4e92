r"""Traffic instead of prompts: goodput of SGLang's servers, with several patterns, under the same requests.

    python -m scripts.bench.serving.traffic --model GLM-5-rank --engine '{"skip_tokenizer_init": true, ...}' \
        --rates 0.5,1,2 --sessions 2,4,8 --ttft 3x --tpot 2x plain quarter=FSSSFSSSFSSSFSSS 'plan=FSFF...+0q4'
    python -m scripts.bench.serving.traffic --endpoint plain=http://a:30000 --endpoint plan=http://b:30000 --rates 1

Two workloads, see `workload`:
- mixture (`--rates`, requests a second): prompts of many lengths that nobody has sent before, at times of their own;
- agentic (`--sessions`, at work at once): each has a long prefix in the cache, and turns of some new tokens and answer.

Conditions are those of `conditions`, the first one the measure: limits such as `3x` are multiples of what a request of
so many new tokens takes on it while it does nothing else. Servers run side by side and take turns, every second round
in the other order, or one after the other (`--one-by-one`); requests, and the times between them, are the same for all.
A request is good if it met both limits; one that failed or got fewer tokens is not, but is counted. Goodput is good
requests a second until the last one has ended, as in SGLang's `bench_serving`, which is not the client: see `replay`.

A server that does not start or dies is named with its last line, and the others go on. After `--limit` seconds the
table has what was measured so far. The JSON is written after each cell; the exit code is 1 if anything is missing.
Servers on one GPU share its memory: bound `max_total_tokens`; `stream_interval` keeps the client small.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from scripts.bench.serving.conditions import Condition, checked, ports
from scripts.bench.serving.engines import EngineLostError, Limit, OutOfTimeError
from scripts.bench.serving.goodput import Bound, Limits, Unloaded, summary
from scripts.bench.serving.http_servers import Server
from scripts.bench.serving.replay import Outcome, replay
from scripts.bench.serving.workload import Agentic, Mixture, Session, Span, Turn, tokens

MIXTURE, AGENTIC = "mixture", "agentic"
REPEATS = 3  # of each prompt that is timed alone, behind one that warms up
ALONE_TOKENS = 33  # generated then


def main() -> int:
    parser = command_line()
    options = parser.parse_args()
    try:
        options.engine = json.loads(options.engine)
        if bool(options.endpoint) == bool(options.conditions) or (options.conditions and options.model is None):
            raise ValueError("expected either conditions with --model, or --endpoint")
        if options.conditions:
            checked(options.conditions, options.model, options.engine)
        bench = Bench(options)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end, and what was measured is written
    return bench.run()


class Bench:
    """One run: its servers, cells and results.

    Args:
        options: of the command line.

    Raises:
        ValueError: if no traffic is asked for, or a rate or a number of sessions can't be.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._limit, self._places = options, Limit(options.limit), ports()
        self._workloads: dict[str, Mixture | Agentic] = {
            MIXTURE: Mixture(
                options.lengths,
                options.median,
                options.sigma,
                options.output_tokens,
                options.requests,
                options.burstiness,
                options.vocabulary,
            ),
            AGENTIC: Agentic(
                options.prefix, options.turns, options.new, options.output_tokens, options.think, options.vocabulary
            ),
        }
        self._cells = [(MIXTURE, rate) for rate in options.rates] + [(AGENTIC, number) for number in options.sessions]
        if not self._cells:
            raise ValueError("expected --rates or --sessions")
        for workload, load in self._cells:
            self._workloads[workload].sessions(load, options.seed)
        self._rounds: dict[tuple[str, float], dict[str, list[tuple[list[Outcome], float]]]] = {
            cell: {} for cell in self._cells
        }
        self._alone: dict[str, dict[str, Unloaded]] = {MIXTURE: {}, AGENTIC: {}}
        self._fresh = count()
        self.lost: dict[str, str] = {}
        self._whole = True

    def run(self) -> int:
        """Start servers, replay, print the table, and write; return the exit code."""
        names = [name for name, _ in self._options.endpoint] or [item.name for item in self._options.conditions]
        groups = [[name] for name in names] if self._options.one_by_one else [names]
        try:
            for group in groups:
                self._group(group)
        except OutOfTimeError:
            self._whole = False
            print(f"stopped after {self._options.limit:.0f} s", flush=True)
        finally:
            self._write()
            for line in self.table():
                print(line, flush=True)
        failed = any(row["failed"] for row in self.rows())
        return 0 if self._whole and not self.lost and not failed else 1

    def _group(self, names: list[str]) -> None:
        servers: dict[str, Server] = {}
        try:
            for name in names:
                servers[name] = self._started(name)
            for name in names:
                try:
                    servers[name].wait(self._options.start, self._limit)
                    print(f"{name}: up at {servers[name].url}, {servers[name].state.get('pattern')}", flush=True)
                except EngineLostError as error:
                    self._lose(servers, name, str(error))
            for workload in dict.fromkeys(workload for workload, _ in self._cells):
                for name in list(servers):
                    self._time_alone(servers, name, workload)
            for cell in self._cells:
                self._cell(servers, *cell)
        finally:
            for server in servers.values():
                server.end()

    def _started(self, name: str) -> Server:
        options = self._options
        for endpoint, url in options.endpoint:
            if endpoint == name:
                return Server(name, url)
        condition = next(item for item in options.conditions if item.name == name)
        log = options.output.absolute().with_suffix(f".{name}.log")
        return Server.start(condition, options.engine, options.model, next(self._places), log)

    def _time_alone(self, servers: dict[str, Server], name: str, workload: str) -> None:
        """Time requests of several lengths on a server that does nothing else; they warm it up, too."""
        span, prefix, found = self._options.lengths, tuple[int, ...](), self._workloads[workload]
        if isinstance(found, Agentic):
            span, prefix = found.new, found.start(0)
            self._replay(servers, name, [self._alone_session(prefix, 1)])
        lengths = sorted({round(span.low * (span.high / span.low) ** (step / 3)) for step in range(4)})
        first, token = [], []
        for length in lengths:
            outcomes: list[Outcome] = []
            for _ in range(REPEATS + 1):
                outcomes += self._replay(servers, name, [self._alone_session(prefix, length)])[0]
            error = next((outcome.error for outcome in outcomes if outcome.error), None)
            if error is not None:
                self._lose(servers, name, error if servers[name].alive() else servers[name].why())
                return
            first.append(statistics.median(outcome.first for outcome in outcomes[1:]))
            token.append(statistics.median(outcome.token for outcome in outcomes[1:]))
        self._alone[workload][name] = Unloaded(tuple(lengths), tuple(first), tuple(token))
        each = zip(lengths, first, token, strict=True)
        text = "; ".join(f"{length}: {1e3 * one:.1f} ms, {1e3 * two:.3f} ms" for length, one, two in each)
        print(f"{workload}, {name} alone, TTFT and TPOT by new tokens: {text}", flush=True)

    def _alone_session(self, prefix: tuple[int, ...], length: int) -> Session:
        rng = random.Random(f"alone-{next(self._fresh)}")  # noqa: S311
        return Session(prefix, (Turn(0.0, tokens(rng, length, self._options.vocabulary), ALONE_TOKENS),))

    def _cell(self, servers: dict[str, Server], workload: str, load: float) -> None:
        found = self._workloads[workload]
        for turn in range(self._options.rounds):
            sessions = found.sessions(load, self._options.seed + turn)
            for name in list(servers)[:: 1 if turn % 2 == 0 else -1]:
                if isinstance(found, Agentic):  # prefixes that others have pushed out of the cache come back
                    for number in range(len(sessions)):
                        self._replay(servers, name, [self._alone_session(found.start(number), 1)])
                result = self._replay(servers, name, sessions)
                self._limit.left(1)
                self._rounds[workload, load].setdefault(name, []).append(result)
                if not servers[name].alive():
                    self._lose(servers, name, servers[name].why())
        for row in self.rows():
            if (row["workload"], row["load"]) == (workload, load):
                print(line_of(row), flush=True)
        self._write()

    def _replay(self, servers: dict[str, Server], name: str, sessions: list[Session]) -> tuple[list[Outcome], float]:
        self._limit.left(1)
        return replay(servers[name].url, sessions, self._limit)

    def _lose(self, servers: dict[str, Server], name: str, reason: str) -> None:
        self.lost[name] = reason
        servers.pop(name).end()
        print(f"{name}: lost: {reason}", flush=True)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield what was found of each cell and server."""
        for (workload, load), servers in self._rounds.items():
            alone = self._alone[workload]
            measure = next(iter(alone), None)
            limits = Limits(self._options.ttft, self._options.tpot, None if measure is None else alone[measure])
            for name, rounds in servers.items():
                yield {"workload": workload, "load": load, "server": name, **summary(rounds, limits)}

    def table(self) -> Iterator[str]:
        """Yield the lines of the table."""
        options = self._options
        measures = {workload: next(iter(found)) for workload, found in self._alone.items() if found}
        yield f"limits: TTFT {options.ttft}, TPOT {options.tpot}; multiples are of {measures or 'nothing'}, alone"
        times = f"{'TTFT p50/p90/p99 ms':>22} {'TPOT p50/p90/p99 ms':>23}"
        yield f"{'':>26} {'goodput':>9} {'(rounds)':>15} {'met TTFT TPOT':>18} {times}"
        yield from map(line_of, self.rows())
        yield from (f"{name}: lost: {reason}" for name, reason in self.lost.items())

    def _write(self) -> None:
        alone = {work: {name: asdict(times) for name, times in found.items()} for work, found in self._alone.items()}
        given = {name: str(value) for name, value in vars(self._options).items()}
        content = {"options": given, "alone": alone, "rows": list(self.rows()), "lost": self.lost}
        self._options.output.write_text(json.dumps(content, indent=1) + "\n")


def line_of(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    name = f"{row['workload']} {row['load']:g} {row['server']}"
    rounds = "-".join(f"{edge(row['goodput_rounds']):.3f}" for edge in (min, max))
    times = [
        "/".join(f"{value:.{digits}f}" for value in row[kind]) if row[kind] else "-"
        for kind, digits in (("ttft_ms", 0), ("tpot_ms", 2))
    ]
    shares = " ".join(f"{row[kind]:4.0%}" for kind in ("met", "met_ttft", "met_tpot"))
    before = "-" if row["before_first"] is None else f"{row['before_first']:.0%}"
    return (
        f"{name:<26} {row['goodput']:9.3f} ({rounds:>13}) {shares:>18}"
        f" {times[0]:>22} {times[1]:>23}  {row['output_tokens_per_s']:.1f} tok/s,"
        f" {row['prompt_tokens_per_s']:.0f} of prompts, {row['cached']:.0%} cached, {row['at_once']:.1f} at once,"
        f" {before} of the time before first tokens, {row['failed']} of {row['requests']} failed"
        + "".join(f"; {error}" for error in row["errors"][:1])
    )


def command_line() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "conditions", nargs="*", type=Condition.parse, help="NAME=LETTERS [++ JSON], or plain; the first is the measure"
    )
    add("--endpoint", action="append", default=[], type=endpoint, metavar="NAME=URL", help="a server that runs")
    add("--model", type=Path, help="folder with config.json, of conditions")
    add("--engine", default="{}", help="more arguments of sglang.Engine, JSON")
    add("--rates", type=numbers, default=[], help="of the mixture, requests a second")
    add("--requests", type=int, default=40, help="of the mixture, in each round")
    add("--lengths", type=Span.parse, default=Span(2048, 131072), help="LOW:HIGH, tokens of the mixture's prompts")
    add("--median", type=int, default=16384, help="of these lengths, a lognormal distribution")
    add("--sigma", type=float, default=1.0, help="of their logarithms")
    add("--burstiness", type=float, default=1.0, help="shape of the Gamma distribution of the times between requests")
    add("--sessions", type=numbers, default=[], help="agents that are at work at once")
    add("--turns", type=int, default=4, help="of an agent, in each round")
    add("--prefix", type=int, default=100_000, help="tokens that an agent has in the cache before")
    add("--new", type=Span.parse, default=Span(1000, 4000), help="LOW:HIGH, new tokens of a turn")
    add("--think", type=float, default=2.0, help="mean seconds between an agent's turns")
    add("--output-tokens", type=Span.parse, default=Span(200, 500), help="LOW:HIGH, generated for each request")
    add("--ttft", type=Bound.parse, default=Bound.parse("3x"), help="limit: 3x, 2s or 50ms")
    add("--tpot", type=Bound.parse, default=Bound.parse("2x"), help="limit: 3x, 2s or 50ms")
    add("--rounds", type=int, default=2)
    add("--seed", type=int, default=0, help="of the first round")
    add("--vocabulary", type=int, default=30000, help="token ids are below")
    add("--one-by-one", action="store_true", help="a server ends before the next one starts")
    add("--limit", type=float, help="seconds after which the run ends with what it has")
    add("--start", type=float, default=900, help="seconds that a server may take to start")
    add("--output", type=Path, default=Path("bench_traffic.json"))
    return parser


def endpoint(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http://")):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=http://HOST:PORT")
    return name, url.rstrip("/")


def numbers(text: str) -> list[float]:
    return [float(item) for item in text.split(",") if item]


if __name__ == "__main__":
    sys.exit(main())
