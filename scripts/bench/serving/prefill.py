r"""Times of prompts and of decoding steps, of SGLang's engines that take turns in one run. Needs SGLang and a GPU.

    python -m scripts.bench.serving.prefill --model GLM-5-rank --lengths 32768,131072 plain all-f=F*16 'plan=FSFF+0q4'
    python -m scripts.bench.serving.prefill --model GLM-5-rank --lengths 131072 --decode-only 8x131072,32x32768 plain \
        'q8=plain ++ {"dsa_prefill_backend": "flashmla_sparse_q8"}' quarter-switch=FSSSFSSSFSSSFSSS

A condition is NAME=LETTERS or NAME=LETTERS ++ JSON, see `conditions`: letters and arguments of its own, so that
whatever SGLang offers stands in one table. All engines stay; they are timed one after the other, round by round, so
that a drift of the machine hits all alike. An engine that does not start, hangs or dies is named with its last line,
and the others go on; after `--limit` seconds what was measured so far is printed. The JSON is written after each cell,
and the exit code is 1 if anything is missing.

Prints medians, the spread of the rounds, and how often each is as fast as the first one. Cells of `--decode-only` are
read once and then found in the prefix cache, which all engines then have: a token is timed alone, and what was cached
stands beside it, and how many tokens a step gave where drafts were accepted. `--profile` also counts the kernels of one
prompt, by kind. What an engine prints goes to a log beside `--output`. Engines on one GPU share its memory: bound
`max_total_tokens`.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.bench import child
from scripts.bench.serving.conditions import Condition, checked, ports
from scripts.bench.serving.engines import Engine, EngineLostError, Limit, OutOfTimeError
from scripts.bench.serving.kernel_times import kernels
from scripts.bench.serving.plugin import agreement, served, stream

STEPS, STEPS_ALONE = 40, 120  # generated in a cell, and in one of --decode-only
CACHED = 0.95  # of the tokens of a prompt, which are expected where it was read before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conditions", nargs="*", type=Condition.parse, help="NAME=LETTERS [++ JSON], or plain")
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json")
    parser.add_argument("--lengths", default="32768,65536,131072", help="tokens of a prompt, or 8x131072 for 8 of them")
    parser.add_argument("--decode-only", default="", help="more such cells, whose prompts are read once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, JSON")
    parser.add_argument("--at-once", type=int, help="engines that start at a time; by default all")
    parser.add_argument("--limit", type=float, help="seconds after which the run ends with what it has")
    parser.add_argument("--start", type=float, default=900, help="seconds that an engine may take to start")
    parser.add_argument("--answer", type=float, default=300, help="seconds that an engine may take for a cell")
    parser.add_argument("--greedy", default="300,3000,9000", help="tokens of the prompts whose answers are compared")
    parser.add_argument("--vocabulary", type=int, default=30000, help="token ids are below")
    parser.add_argument("--profile", type=int, help="length of a prompt whose kernels are counted")
    parser.add_argument("--output", type=Path, default=Path("bench_prefill.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
        return 0
    try:
        if options.decode_only:
            options.engine = json.dumps({**json.loads(options.engine), "disable_radix_cache": False})
        checked(options.conditions, options.model, json.loads(options.engine))
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines end, and what was measured is written
    with tempfile.TemporaryDirectory() as folder:
        return Bench(options, Path(folder)).run()


class Bench:
    """The engines of one run, and what they have given so far.

    Args:
        options: of the command line.
        folder: for pattern files.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder, self._limit = options, folder, Limit(options.limit)
        self._engines: dict[str, Engine] = {}
        self.results: dict[str, dict[str, Any]] = {
            condition.name: {"condition": condition_of(condition), "times": {}, "failed": {}}
            for condition in options.conditions
        }
        self._complete = True

    def run(self) -> int:
        """Start, time, and write; return the exit code."""
        options = self._options
        try:
            self._start()
            for cell in filter(None, options.lengths.split(",")):
                self._cell(cell, alone=False)
            for cell in filter(None, options.decode_only.split(",")):
                self._cell(cell, alone=True)
            if options.profile:
                self._profile(options.profile)
        except OutOfTimeError:
            self._complete = False
            print(f"stopped after {options.limit:.0f} s", flush=True)
        finally:
            for engine in self._engines.values():
                engine.end()
            self._write()
        whole = all("lost" not in item and not item["failed"] for item in self.results.values())
        return 0 if self._complete and whole else 1

    def _start(self) -> None:
        options, begin = self._options, time.perf_counter()
        conditions, places = options.conditions, ports()
        asked = [(condition, next(places)) for condition in conditions]

        def start(item: tuple[Condition, dict[str, int]]) -> dict[str, Any] | None:
            condition, place = item
            try:
                self._limit.left(1)
                engine = Engine(condition, options, self._folder, place, self._limit)
                self._engines[condition.name] = engine
                return engine.ready(options.start)
            except EngineLostError as error:
                self._lose(condition.name, str(error))
            except OutOfTimeError:
                self._lose(condition.name, "not up when the time was over")
            return None

        with ThreadPoolExecutor(options.at_once or max(1, len(conditions))) as pool:
            try:
                answers = list(pool.map(start, asked))
            except BaseException:  # of SIGTERM or Ctrl-C: none that starts is waited for
                pool.shutdown(wait=False, cancel_futures=True)
                for engine in list(self._engines.values()):
                    engine.end()
                raise
        ready = {condition.name: answer for condition, answer in zip(conditions, answers, strict=True) if answer}
        self._engines = {name: self._engines[name] for name in ready}  # in the order of the command line
        for name, answer in ready.items():
            self.results[name]["start"] = answer
            equal = agreement(next(iter(ready.values())), answer)
            print(
                f"{name}: up in {answer['start_s']:.0f} s, serves {answer['serves']}, "
                f"{answer['grouped']} layers grouped, by unions {answer.get('unions') or 'none'}, tokens equal {equal}"
                + "".join(f", {other}: {json.dumps(state)}" for other, state in answer["others"].items()),
                flush=True,
            )
        self._ignored(ready)
        print(f"{len(ready)} of {len(conditions)} engines up after {time.perf_counter() - begin:.0f} s", flush=True)
        self._write()

    def _ignored(self, ready: dict[str, dict[str, Any]]) -> None:
        """Name conditions of SGLang's switch that answer as without it."""
        found = {condition.name: condition for condition in self._options.conditions if condition.name in ready}
        for name, condition in found.items():
            for other, stock in found.items():
                same = stock.pattern is None and stock.arguments == condition.arguments
                if condition.switch and same and ready[name]["greedy"] == ready[other]["greedy"]:
                    print(f"{name}: answers like {other}, so SGLang may ignore its switch", flush=True)

    def _cell(self, cell: str, *, alone: bool) -> None:
        """Time one cell on all engines, in turns; print and write it."""
        kinds = ("decode_ms", "cached", "accepted") if alone else ("prefill_ms", "decode_ms")
        try:
            for turn in range(self._options.rounds + 1):  # the first one warms up
                self._limit.left(1)
                for name in list(self._engines):
                    if cell in self.results[name]["failed"]:
                        continue
                    answer = self._ask(name, cell=cell, turn=turn, alone=alone)
                    if answer is not None and "error" in answer:
                        self.results[name]["failed"][cell] = answer["error"]
                        print(f"{cell:>9} {name:<24} {answer['error']}", flush=True)
                    elif answer is not None and turn:
                        times = self.results[name]["times"].setdefault(cell, {kind: [] for kind in kinds})
                        for kind in kinds:
                            times[kind].append(answer[kind])
        finally:
            table(self.results, cell)
            self._write()

    def _profile(self, length: int) -> None:
        for name in list(self._engines):
            answer = self._ask(name, profile=length)
            if answer is not None:
                self.results[name]["profile"] = answer
                print(f"{name}: {json.dumps(answer)}", flush=True)

    def _ask(self, name: str, **what: Any) -> dict[str, Any] | None:
        try:
            return self._engines[name].ask(self._options.answer, **what)
        except EngineLostError as error:
            self._lose(name, str(error))
            return None

    def _lose(self, name: str, reason: str) -> None:
        self.results[name]["lost"] = reason
        engine = self._engines.pop(name, None)
        if engine is not None:
            engine.end()
        print(f"{name}: lost: {reason}", flush=True)

    def _write(self) -> None:
        self._options.output.write_text(json.dumps(self.results, indent=1) + "\n")


def condition_of(condition: Condition) -> dict[str, Any]:
    """Return what a condition is, for the file of results."""
    letters = None if condition.pattern is None else condition.pattern.letters
    return {"letters": letters, "switch": condition.switch, "arguments": dict(condition.arguments)}


def serve(options: argparse.Namespace) -> None:
    """Run one engine: greedy tokens of fixed prompts, then times of what is asked for on standard input."""
    import sglang
    import torch
    import triton

    begin, arguments = time.perf_counter(), json.loads(options.engine)
    engine = sglang.Engine(model_path=str(options.model), **arguments)
    greedy = []
    for length in map(int, options.greedy.split(",")):
        parameters = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answer = engine.generate(input_ids=prompt(length, 0, options.vocabulary), sampling_params=parameters)
        greedy.append({"tokens": answer["output_ids"]})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"sglang": sglang.__version__, "torch": torch.__version__, "triton": triton.__version__, "device": device}
    give({"start_s": time.perf_counter() - begin, **served(engine), "greedy": greedy, "about": about})
    cached = not arguments.get("disable_radix_cache")
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "profile" in asked:
                give(kernels(engine, prompt(asked["profile"], 7, options.vocabulary)))
            else:
                give(timed(engine, options.vocabulary, flush=cached, **asked))
        except Exception as error:
            give({"error": f"{type(error).__name__}: {error}"[:300]})


def timed(
    engine: Any, vocabulary: int, *, cell: str, turn: int, alone: bool = False, flush: bool = False
) -> dict[str, Any]:
    """Time the prompts of one cell; those that are read once are the same in all turns."""
    requests, _, length = cell.rpartition("x")
    if flush and not (alone and turn):
        engine.flush_cache()
    seed = 0 if alone else turn
    ids = [prompt(int(length), seed + number, vocabulary) for number in range(int(requests or 1))]
    if alone:
        _, each, cached, accepted = several(engine, ids, STEPS_ALONE)
        return {"decode_ms": 1e3 * each, "cached": cached, "accepted": accepted}
    first, each = stream(engine, ids[0], STEPS) if len(ids) == 1 else several(engine, ids, STEPS)[:2]
    return {"prefill_ms": 1e3 * first, "decode_ms": 1e3 * each}


def prompt(length: int, seed: int, vocabulary: int = 30000) -> list[int]:
    """Return random token ids."""
    rng = random.Random(seed)  # noqa: S311
    return [rng.randrange(10, vocabulary) for _ in range(length)]


def several(engine: Any, ids: list[list[int]], steps: int) -> tuple[float, float, float, float]:
    """Time requests that are sent at once.

    Returns:
        Seconds until all have their first token, seconds of each later token, the smallest share of a prompt that was
        in the prefix cache, and tokens of a step, more than one where drafts were accepted.

    Raises:
        ValueError: if no tokens come while all are decoded.
    """
    begin, seen, cached, accepted = time.perf_counter(), defaultdict(list), {}, {}
    parameters = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    for answer in engine.generate(input_ids=ids, sampling_params=parameters, stream=True):
        index, meta = answer.get("index", 0), answer["meta_info"]
        seen[index].append((time.perf_counter() - begin, meta["completion_tokens"]))
        cached[index] = meta["cached_tokens"] / len(ids[index])
        accepted[index] = meta.get("spec_accept_length") or 1.0
    if len(seen) != len(ids):
        raise ValueError(f"{len(seen)} of {len(ids)} requests were answered")
    last = max(times[0][0] for times in seen.values())
    end = min(times[-1][0] for times in seen.values())
    steady = ([item for item in times if last < item[0] <= end] for times in seen.values())
    after = max(steady, key=len)
    if len(after) < 2 or after[-1][1] == after[0][1]:
        raise ValueError(f"no tokens while all {len(ids)} requests are decoded; expected a larger max_running_requests")
    each = (after[-1][0] - after[0][0]) / (after[-1][1] - after[0][1])
    return last, each, min(cached.values()), statistics.mean(accepted.values())


def give(result: dict[str, Any]) -> None:
    sys.stdout.write("\n" + child.RESULT + json.dumps(result) + "\n")
    sys.stdout.flush()


def table(results: dict[str, dict[str, Any]], cell: str) -> None:
    """Print the medians of one cell with their spread, beside those of the first condition that has it."""
    found = {name: item["times"][cell] for name, item in results.items() if cell in item["times"]}
    for name, times in found.items():
        base, parts, gains = found[next(iter(found))], [], []
        for kind, label in (("prefill_ms", "prefill"), ("decode_ms", "decode")):
            if kind in times:
                median = statistics.median(times[kind])
                spread = (max(times[kind]) - min(times[kind])) / median
                parts.append(f"{label} {median:9.3f} ms ({spread:.1%} spread)")
                gains.append(f"{statistics.median(base[kind]) / median:.2f}x")
        if "cached" in times:
            cached = min(times["cached"])
            parts.append(f"{cached:.0%} cached" + ("" if cached >= CACHED else ", READ ANEW: the cache is too small"))
            if (accepted := statistics.mean(times["accepted"])) > 1:
                parts.append(f"{accepted:.2f} tokens a step")
        rounds = len(times["decode_ms"])
        print(f"{cell:>9} {name:<24} {', '.join(parts)}, {rounds} rounds: {', '.join(gains)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
