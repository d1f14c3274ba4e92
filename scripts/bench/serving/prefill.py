"""Times of prompts with several patterns, whose engines take turns in one run. Needs SGLang and a GPU.

    python -m scripts.bench.serving.prefill --model GLM-5-rank --lengths 32768,131072 plain all-f=F*16 'plan=FSFF+0q4'

A condition is NAME=LETTERS; `F*16` is 16 F. A name that ends with `-alone` has `--indexcache-no-grouping`, one that
ends with `-sharded` has `--indexcache-shard-indexers`; `plain` alone is SGLang without the plugin. All engines start at
once and stay; then they are timed one after the other, round by round, so that a drift of the machine hits all alike.
Prints medians, the spread of the rounds, and how often each is as fast as the first one. `--profile` also counts the
kernels of one prompt, by kind. What an engine prints goes to a log beside `--output`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.bench import child
from scripts.bench.serving.plugin import agreement, served, stream
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.io.refusal import GROUPING_VARIABLE, PATTERN_VARIABLE, SHARD_VARIABLE

PLAIN = "plain"
KINDS = (  # the first that is found in a kernel's name
    ("scores", "mqa_logits"),
    ("blocks", "_mean_kernel|_lowest_kernel|_expand_kernel"),
    ("top-k", "topk|top_k"),
    ("indexer", "indexer|index_k|get_k_and_s|_get_k|hadamard"),
    ("attention", "sparse|mla|splitkv|flash_fwd|_add_own"),
    ("gather", "all_?gather"),
    ("reduce", "nccl|all_reduce|cross_device"),
    ("products", "nvjet|gemm|cutlass|cublas|splitk"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conditions", nargs="*", help="NAME=LETTERS, or plain")
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json")
    parser.add_argument("--lengths", default="32768,65536,131072", help="tokens of a prompt, or 8x131072 for 8 of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, JSON")
    parser.add_argument("--profile", type=int, help="length of a prompt whose kernels are counted")
    parser.add_argument("--output", type=Path, default=Path("bench_prefill.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options)
    with tempfile.TemporaryDirectory() as folder:
        found = {name: Engine(name, letters, options, Path(folder)) for name, letters in map(split, options.conditions)}
        ready = {name: engine.ready() for name, engine in found.items()}
        for name, answer in ready.items():
            equal = agreement(ready[next(iter(ready))], answer)
            print(
                f"{name}: up in {answer['start_s']:.0f} s, serves {answer['serves']}, "
                f"{answer['grouped']} layers grouped, tokens equal {equal}",
                flush=True,
            )
        results: dict[str, dict[str, Any]] = {name: {"start": answer, "times": {}} for name, answer in ready.items()}
        for cell in options.lengths.split(","):
            for turn in range(options.rounds + 1):  # the first one warms up
                for name, engine in found.items():
                    answer = engine.ask(cell=cell, seed=turn)
                    if turn:
                        times = results[name]["times"].setdefault(cell, {"prefill_ms": [], "decode_ms": []})
                        for kind, values in times.items():
                            values.append(answer[kind])
            table(results, cell)
        if options.profile:
            for name, engine in found.items():
                results[name]["profile"] = engine.ask(profile=options.profile)
                print(f"{name}: {json.dumps(results[name]['profile'])}", flush=True)
        for engine in found.values():
            engine.end()
    options.output.write_text(json.dumps(results, indent=1))


def split(condition: str) -> tuple[str, str]:
    """Return name and letters of a condition, with `F*16` written out."""
    name, _, letters = condition.partition("=")
    return name, re.sub(r"([FS])\*(\d+)", lambda match: match[1] * int(match[2]), letters)


class Engine:
    """An engine in a process of its own, which waits for what to time."""

    def __init__(self, name: str, letters: str, options: argparse.Namespace, folder: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if key != PATTERN_VARIABLE}
        self._name, self._pattern = name, None if name == PLAIN else Pattern.parse(letters)
        if self._pattern is not None:
            environment[PATTERN_VARIABLE] = write_pattern(self._pattern, options.model, folder / f"{name}.yaml")
        environment[GROUPING_VARIABLE] = "1" if "-alone" in name else "0"
        environment[SHARD_VARIABLE] = "1" if "-sharded" in name else "0"
        command = [
            sys.executable,
            "-m",
            "scripts.bench.serving.prefill",
            "--child",
            name,
            "--model",
            str(options.model),
        ]
        self._process = subprocess.Popen(
            [*command, "--engine", options.engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._log = options.output.with_suffix(f".{name}.log").open("w", buffering=1)

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is up, and return what it says.

        Raises:
            SystemExit: unless it has proven the requested pattern.
        """
        answer = self.ask()
        expected = None if self._pattern is None else self._pattern.letters
        if answer["serves"] != expected:
            raise SystemExit(f"{self._name}: serves {answer['serves']}, expected {expected}")
        return answer

    def ask(self, **what: Any) -> dict[str, Any]:
        """Have something timed, and return it; without anything wait for what the engine says first."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        if what:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
        lines = []
        for line in process.stdout:
            lines.append(line)
            self._log.write(line)
            if line.startswith(child.RESULT):
                found: dict[str, Any] = json.loads(line.removeprefix(child.RESULT))
                return found
        raise SystemExit("".join(lines[-60:]))

    def end(self) -> None:
        """End the process."""
        self._log.close()
        self._process.kill()  # its schedulers end with it
        self._process.wait()


def serve(options: argparse.Namespace) -> None:
    """Run one engine: greedy tokens of fixed prompts, then times of what is asked for on standard input."""
    import sglang

    begin = time.perf_counter()
    engine = sglang.Engine(model_path=str(options.model), **json.loads(options.engine))
    greedy = []
    for length in (300, 3000, 9000):
        parameters = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answer = engine.generate(input_ids=prompt(length, 0), sampling_params=parameters)
        greedy.append({"tokens": answer["output_ids"]})
    give({"start_s": time.perf_counter() - begin, **served(engine), "greedy": greedy})
    for line in sys.stdin:
        asked = json.loads(line)
        if "profile" in asked:
            give(kernels(engine, asked["profile"]))
            continue
        requests, _, length = asked["cell"].rpartition("x")
        ids = [prompt(int(length), asked["seed"] + number) for number in range(int(requests or 1))]
        if len(ids) == 1:
            first, each = stream(engine, ids[0])
        else:
            first, each = several(engine, ids)
        give({"prefill_ms": 1e3 * first, "decode_ms": 1e3 * each})


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)  # noqa: S311
    return [rng.randrange(10, 30000) for _ in range(length)]


def several(engine: Any, ids: list[list[int]], steps: int = 40) -> tuple[float, float]:
    """Return the seconds until all requests have their first token, and for each later step."""
    begin, seen = time.perf_counter(), defaultdict(list)
    parameters = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    for answer in engine.generate(input_ids=ids, sampling_params=parameters, stream=True):
        seen[answer.get("index", 0)].append((time.perf_counter() - begin, answer["meta_info"]["completion_tokens"]))
    last = max(times[0][0] for times in seen.values())
    after = [item for item in seen[0] if item[0] > last]
    return last, (after[-1][0] - after[0][0]) / max(1, after[-1][1] - after[0][1])


def kernels(engine: Any, length: int) -> dict[str, Any]:
    """Return milliseconds of the first rank's kernels of one prompt by kind, their number, and the longest ones."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
        engine.generate(input_ids=prompt(length, 7), sampling_params={"max_new_tokens": 1, "ignore_eos": True})
        engine.stop_profile()
        time.sleep(1)
        kinds: dict[str, float] = defaultdict(float)
        names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        spans = []
        for path in sorted(Path(folder).rglob("*trace.json*"))[:1]:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            for event in json.loads(content)["traceEvents"]:
                if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
                    continue
                name, took = event["name"], event["dur"] / 1e3
                kind = next((kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE)), "rest")
                kinds[kind] += took
                names[name[:100]][0] += took
                names[name[:100]][1] += 1
                spans.append((event["ts"], event["ts"] + event["dur"], name[:60]))
    spans.sort()
    gaps = [((later[0] - earlier[1]) / 1e3, earlier[2], later[2]) for earlier, later in pairwise(spans)]
    idle = sum(max(0.0, gap) for gap, _, _ in gaps)
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:25]
    return {
        "total_ms": round(sum(kinds.values()), 1),
        "idle_ms": round(idle, 1),
        "launches": len(spans),
        "kinds": {kind: round(took, 1) for kind, took in kinds.items()},
        "gaps": [[round(gap, 2), before, after] for gap, before, after in sorted(gaps, reverse=True)[:15]],
        "longest": [[name, round(took, 2), int(count)] for name, (took, count) in longest],
    }


def give(result: dict[str, Any]) -> None:
    sys.stdout.write("\n" + child.RESULT + json.dumps(result) + "\n")
    sys.stdout.flush()


def table(results: dict[str, dict[str, Any]], cell: str) -> None:
    """Print the medians of one cell, beside the first condition's."""
    medians = {
        name: {kind: statistics.median(values) for kind, values in item["times"][cell].items()}
        for name, item in results.items()
    }
    base = medians[next(iter(medians))]
    for name, found in medians.items():
        values = results[name]["times"][cell]["prefill_ms"]
        spread = (max(values) - min(values)) / found["prefill_ms"]
        gains = ", ".join(f"{base[kind] / found[kind]:.2f}x" for kind in ("prefill_ms", "decode_ms"))
        print(
            f"{cell:>9} {name:<24} prefill {found['prefill_ms']:9.1f} ms ({spread:.1%} spread),"
            f" decode {found['decode_ms']:.3f} ms: {gains}",
            flush=True,
        )


if __name__ == "__main__":
    main()
