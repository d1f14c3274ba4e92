"""Cost and resolution of a search on a live SGLang. Needs SGLang, and a GPU for times.

    python -m scripts.bench.serving.calibration --model /models/GLM-5-FP8 --context 32768 -- --tp 8

Starts one calibration server (flags behind `--` are its), evaluates random patterns on random tokens by switching, the
baseline before and after, then some of the same with a start of the server for each. Prints seconds an evaluation, the
noise floor, the share of time outside the model's forward, and the standard errors of `kl` and `nll` differences over
the same tokens. Forward passes are timed on the GPU by a plugin that this script brings along; --output keeps all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.own_server import own_server
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.evaluation.objectives import Objective
from scripts.bench.timing import timed
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.calibration.protocol import KL, Measured
from sglang_indexcache.families import describe

CLOCK_FILE = "BENCH_FORWARD_CLOCK"
ENTRY_POINTS = "[sglang.srt.plugins]\nbench_forward_clock = scripts.bench.serving.calibration:register_clock\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json")
    parser.add_argument("--tokens", type=Path, help="text as JSON lines of `input_ids`; default: random tokens")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--restarts", type=int, default=2, help="evaluations with a start of the server each")
    parser.add_argument("--output", type=Path, default=Path("bench_calibration.json"))
    parser.add_argument("server", nargs="*", help="flags of the server, behind --")
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    model = describe(config, options.model.name)
    rng = random.Random(0)  # noqa: S311
    sequences = read_tokens(options, config["vocab_size"], rng)
    patterns = [random_pattern(model, rng) for _ in range(options.evaluations)]
    result: dict[str, Any] = {"context": options.context, "sequences": options.sequences}
    data = token_set(sequences, model.index_topk)
    log = options.output.with_suffix(".log")
    with tempfile.TemporaryDirectory() as name, forward_clock(Path(name)) as clock:
        began = time.perf_counter()
        with own_server(str(options.model), options.server, log) as server:
            result["start_s"] = time.perf_counter() - began
            result["versions"] = server.status().versions
            bench = Bench(server, model, data, clock)
            bench.evaluate(model.native, "kl")  # warms up, and runs the baseline
            for objective in ("nll", "kl"):
                result[objective] = [bench.evaluate(pattern, objective) for pattern in (model.native, *patterns)]
            result["first"], result["again"] = bench.tokens(model.native), bench.tokens(model.native)
            result["patterns"] = {pattern.roles: bench.tokens(pattern) for pattern in patterns}
            result["last"] = bench.tokens(model.native)
        result["restarts"] = []
        for pattern in patterns[: options.restarts]:
            began = time.perf_counter()
            with own_server(str(options.model), options.server, log) as server:
                Bench(server, model, data, clock).evaluate(pattern, "nll")
                result["restarts"].append(time.perf_counter() - began)
    options.output.write_text(json.dumps(result))
    for line in table(result):
        print(line)


def token_set(sequences: list[list[int]], index_topk: int) -> TokenSet:
    tokens = np.asarray(sequences, dtype=np.int32)
    scored = np.broadcast_to(np.arange(tokens.shape[1]) > index_topk, tokens.shape).copy()
    return TokenSet(tokens, scored, np.zeros(len(tokens), dtype=np.int64), ("bench",))


def read_tokens(options: argparse.Namespace, vocabulary: int, rng: random.Random) -> list[list[int]]:
    if options.tokens is None:
        return [[rng.randrange(10, vocabulary) for _ in range(options.context)] for _ in range(options.sequences)]
    rows = [json.loads(line)["input_ids"][: options.context] for line in options.tokens.read_text().splitlines()]
    return [row for row in rows if len(row) == options.context][: options.sequences]


def random_pattern(model: ModelLayers, rng: random.Random) -> Pattern:
    shared = set(rng.sample(range(1, model.num_layers), model.num_layers // 2))
    return Pattern.full(model.num_layers, shared | set(model.native.shared_layers))


class Bench:
    """Evaluations of one pattern after the other on one server: as a search does it, and token by token."""

    def __init__(self, server: CalibrationServer, model: ModelLayers, data: TokenSet, clock: Path) -> None:
        self.server, self.data, self.clock = server, data, clock
        self.engine = SglangEngine([server], model)

    def evaluate(self, pattern: Pattern, objective: Objective) -> dict[str, float]:
        """Return the seconds of an evaluation and of its forward passes."""
        self.server.switch(pattern)  # clears the clock of earlier ones
        before = len(read_clock(self.clock))
        _, seconds = timed(lambda: list(self.engine.evaluate([pattern], self.data, objective)))
        self.server.switch(pattern)  # writes the clock
        return {"s": seconds, "forward_s": sum(read_clock(self.clock)[before:])}

    def tokens(self, pattern: Pattern) -> dict[str, Any]:
        """Return `nll` of each token; sum, sum of squares and count of `kl`, for each sequence."""
        self.server.switch(pattern)
        logprobs, sums = [], []
        start = int(np.flatnonzero(self.data.scored[0])[0])
        for row, sequence in enumerate(self.data.tokens.tolist()):
            rid = Measured.new(KL, row, self.data.sha256).rid
            [answer] = self.server.logprobs([sequence], start, [rid])
            logprobs += [logprob for logprob, _ in answer]
            sums.append(self.server.divergences({rid: [(start - 1, len(sequence) - 1)]})[rid])
        return {"nll": logprobs, "kl": sums}


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the results, one line each."""
    yield f"{result['versions']}, {result['sequences']} x {result['context']} tokens, start {result['start_s']:.1f} s"
    for objective in ("nll", "kl"):
        seconds = np.asarray([item["s"] for item in result[objective]])
        outside = 1 - np.asarray([item["forward_s"] for item in result[objective]]) / seconds
        yield (
            f"{objective}: {seconds.mean():.2f} s an evaluation by switching ({seconds.min():.2f} to"
            f" {seconds.max():.2f}), {outside.mean():.1%} outside the forward ({outside.min():.1%} to"
            f" {outside.max():.1%})"
        )
    if result["restarts"]:
        cells = ", ".join(f"{seconds:.2f}" for seconds in result["restarts"])
        yield f"nll with a restart for each evaluation: {cells} s"
    truth = np.asarray(result["first"]["nll"], dtype=np.float64)
    for name in ("again", "last"):
        own = np.asarray(result[name]["nll"], dtype=np.float64)
        mean, error, _ = kl_of(result[name]["kl"])
        yield (
            f"all F {name}: loss differs by {abs(truth.mean() - own.mean()):.1e} nats a token, at most"
            f" {np.abs(truth - own).max():.1e} on a token; kl {mean:.1e} +-{error:.1e}"
        )
    for roles, item in result["patterns"].items():
        difference = truth - np.asarray(item["nll"], dtype=np.float64)
        mean, error, count = kl_of(item["kl"])
        spread = difference.std() / math.sqrt(count)
        yield (
            f"{roles}: nll {difference.mean():+.2e} +-{spread:.1e}, kl {mean:.2e} +-{error:.1e} on {count} tokens;"
            f" the error of kl is {spread / error if error else math.inf:.1f} times smaller"
        )


def kl_of(sums: Sequence[Sequence[float]]) -> tuple[float, float, int]:
    """Return mean, standard error of the mean and count over tokens."""
    total, squares, count = (sum(item[index] for item in sums) for index in range(3))
    mean = total / count
    return mean, math.sqrt(max(squares / count - mean**2, 0) / count), int(count)


@contextmanager
def forward_clock(folder: Path) -> Iterator[Path]:
    """Let servers that start meanwhile find `register_clock`, and write to a file."""
    package = folder / "bench_forward_clock-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-forward-clock\nVersion: 0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINTS)
    root = str(Path(__file__).resolve().parents[3])
    old = {name: os.environ.get(name) for name in (CLOCK_FILE, "PYTHONPATH")}
    os.environ[CLOCK_FILE] = str(folder / "clock")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), root, old["PYTHONPATH"])))
    try:
        yield folder / "clock"
    finally:
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def read_clock(path: Path) -> list[float]:
    """Read the seconds of all forward passes of rank 0 so far."""
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []


def register_clock() -> None:
    """Time the forward passes of rank 0, as an entry point of SGLang; each switch writes them."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_indexcache.sglang import probes

    open_passes: list[tuple[Any, Any]] = []

    def stamp() -> Any:
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        begin = stamp()
        result = original(*args, **kwargs)
        open_passes.append((begin, stamp()))
        return result

    def write(*args: Any, **kwargs: Any) -> None:
        if torch.distributed.get_rank() == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            with Path(os.environ[CLOCK_FILE]).open("a") as file:
                for begin, end in open_passes:
                    seconds = end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3
                    file.write(f"{seconds}\n")
        open_passes.clear()

    HookRegistry.register(probes.FORWARD.target, around, HookType.AROUND)
    HookRegistry.register(probes.FLUSH.target, write, HookType.BEFORE)  # at each switch


if __name__ == "__main__":
    main()
