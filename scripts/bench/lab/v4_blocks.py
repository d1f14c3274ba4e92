r"""Times of DeepSeek-V4 prompts whose C4 layers select in blocks, beside all F and F and S. Needs SGLang and one GPU.

    python -m scripts.bench.serving.cut_down_v4 --output build/v4-cut
    SGLANG_DSV4_FP4_EXPERTS=0 SGLANG_OPT_FP8_WO_A_GEMM=0 python -m scripts.bench.lab.v4_blocks --model build/v4-cut \
        --output build/v4-blocks.json --engine '{"load_format": "dummy", "skip_tokenizer_init": true, ...}'

An engine for each pattern and round, one after the other, rounds mirrored; docs/evidence/deepseek-v4.md has the
arguments of its engine. `base`, the first pattern, is what ratios are of. Exit code 1 if an engine selected in no block
where it should, or in some where it should not, or if greedy tokens of a prompt of 300, which everybody reads whole,
differ between patterns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from indexcache_lab.v4_blocks.plugin import ENTRY, VARIABLE
from scripts.bench import child
from scripts.bench.serving.plugin import served, stream
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern

PATTERNS = "FFFF,FFFF+0q4+1q4+2q4+3q4,FFFF+0q16+1q16+2q16+3q16,FSFS,FSFS+0q16+2q16,FSSS,FSSS+0q16"
SHORT, STEPS = 300, 24


def start(options: argparse.Namespace, text: str, folder: Path) -> Any:
    """Start a measurement in a process of its own."""
    pattern = Pattern.parse(text)
    file = write_pattern(pattern.plain(), options.model, folder / f"{pattern.roles}.yaml")
    os.environ[VARIABLE] = text.partition("+")[2]
    words = ["--child", "--model", str(options.model), "--engine", options.engine, "--lengths", options.lengths]
    return child.start("scripts.bench.lab.v4_blocks", [*words, "--repeats", str(options.repeats)], file)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine: greedy tokens of a short prompt, prefill and decode milliseconds by length, what was selected."""
    import sglang

    engine = sglang.Engine(model_path=str(options.model), **json.loads(options.engine))
    rng = random.Random(0)  # noqa: S311

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, 30000) for _ in range(length)]

    greedy = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}
    short = engine.generate(input_ids=prompt(SHORT), sampling_params=greedy)["output_ids"]
    times = {}
    for length in (int(text) for text in options.lengths.split(",")):
        streams = [stream(engine, prompt(length)) for _ in range(options.repeats + 1)][1:]  # the first one warms up
        times[str(length)] = [[1e3 * seconds for seconds in item] for item in streams]
    serving = served(engine)
    engine.shutdown()
    return {"short": short, "times": times, "blocks": serving["others"].get(ENTRY, {}), **serving}


def table(results: list[dict[str, Any]], patterns: list[str]) -> Iterator[str]:
    """Yield prompts and decoding by length, the fastest of all rounds, and how often each is as fast as the base."""
    for length in results[0]["times"]:
        best = {}
        for text in patterns:
            rounds = [min(item[0] for item in one["times"][length]) for one in results if one["pattern"] == text]
            decoding = min(item[1] for one in results if one["pattern"] == text for item in one["times"][length])
            best[text] = min(rounds)
            spread = (max(rounds) - min(rounds)) / min(rounds)
            ratio = best[patterns[0]] / best[text]
            cells = f"{best[text]:9.1f} ms {ratio:6.3f}x  rounds {spread:.1%}  {decoding:.2f} ms a token"
            yield f"{length:>7} {text:<30} {cells}"


def problems(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is not as it should be."""
    for one in results:
        asked, passes = "+" in one["pattern"], one["blocks"].get("passes", 0)
        if asked != bool(passes):
            yield f"{one['pattern']}: {passes} passes selected in blocks"
        if one["serves"] != one["pattern"].partition("+")[0]:
            yield f"{one['pattern']}: proven is {one['serves']}"
        if one["short"] != results[0]["short"]:
            yield f"{one['pattern']}: other tokens behind a prompt of {SHORT} tokens than {results[0]['pattern']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json")
    parser.add_argument("--patterns", default=PATTERNS, help="letters with or without blocks, the base first")
    parser.add_argument("--lengths", default="32768,131072,262144")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2, help="prompts of each length and round")
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, JSON")
    parser.add_argument("--output", type=Path, default=Path("build/v4-blocks.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child.give(measure(options))
    patterns, results = options.patterns.split(","), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            for text in patterns if turn % 2 == 0 else patterns[::-1]:
                result, _ = child.result_of(start(options, text, Path(folder)))
                results.append({"pattern": text, **result})
                print(json.dumps(results[-1])[:400], flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1))
    for line in table(results, patterns):
        print(line)
    found = list(problems(results))
    for line in found:
        print(f"PROBLEM {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
