"""Times and tokens of serving through the plugin, beside SGLang without it. Needs SGLang and a GPU.

    python -m scripts.bench.serving.plugin --model /models/GLM-5-FP8 --pattern glm5.yaml@1/4 --lengths 4096,131072
    python -m scripts.bench.serving.plugin --model /models/GLM-5-FP8 --pattern FSSS...+0q16+4q16 --pairs gain

Starts an engine for each condition and round, one after the other: `switch` gives the pattern to SGLang by hand (not
DeepSeek-V4's, which has no such configuration), `plugin` by `SGLANG_INDEXCACHE_PATTERN`; `plain` is SGLang as it is,
`plugin-full` the plugin with all layers F. `--pairs gain` sets `plugin` beside `plain`: the saving from sharing.
Rounds are mirrored (a b b a), so that a drift of the machine hits both alike. Prints the ratio of the fastest of
each pair (a disturbed host only adds time) with the spread of the rounds; --output keeps everything.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench import child
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.sglang.requested import KEY

PAIRS = {"switch": ("switch", "plugin"), "plain": ("plain", "plugin-full"), "gain": ("plain", "plugin")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json")
    parser.add_argument("--pattern", required=True, help="letters, or a pattern file")
    parser.add_argument("--lengths", default="4096,32768,131072", help="prompt lengths to time; empty for none")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length and round")
    parser.add_argument("--pairs", default="switch,plain", help=f"comparisons to make, of {', '.join(PAIRS)}")
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, JSON")
    parser.add_argument("--parallel", action="store_true", help="all engines at once: for tokens, not for times")
    parser.add_argument("--output", type=Path, default=Path("bench_serving.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child.give(measure(options))
    pairs = [PAIRS[name] for name in options.pairs.split(",")]
    order = [
        condition
        for pair in pairs
        for turn in range(options.rounds)
        for condition in (pair if turn % 2 == 0 else pair[::-1])
    ]
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(options, Path(folder))
        started = [] if not options.parallel else [start(options, condition, files) for condition in order]
        results: list[dict[str, Any]] = []
        for index, condition in enumerate(order):
            process = started[index] if options.parallel else start(options, condition, files)
            result, _ = child.result_of(process)
            results.append({"condition": condition, **result})
            print(json.dumps(results[-1])[:600], flush=True)
    options.output.write_text(json.dumps(results, indent=1))
    for line in table(results, pairs):
        print(line)


def write_files(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the pattern under test and all F, as files for this model."""
    config = json.loads((options.model / "config.json").read_text())
    model = describe(config, options.model.name)
    tested = PatternSpec.read(options.pattern).known()
    if "switch" in options.pairs.split(","):
        tested.check_plain("has no switch of SGLang's")
    found: dict[str, Any] = {"override": json.dumps(family_of(model.architecture).sglang.to_overrides({}, tested))}
    for name, pattern in (("plugin", tested), ("plugin-full", Pattern.full(model.num_layers))):
        found[name] = write_pattern(pattern, options.model, folder / f"{name}.yaml")
    return found


def start(options: argparse.Namespace, condition: str, files: dict[str, Any]) -> subprocess.Popen[str]:
    engine = json.loads(options.engine)
    if condition == "switch":
        engine["json_model_override_args"] = files["override"]
    arguments = ["--child", condition, "--model", str(options.model), "--pattern", options.pattern]
    arguments += ["--lengths", options.lengths, "--repeats", str(options.repeats), "--engine", json.dumps(engine)]
    return child.start("scripts.bench.serving.plugin", arguments, files.get(condition))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine: start-up seconds, greedy tokens of fixed prompts, prefill and decode milliseconds by length."""
    begin = time.perf_counter()
    import sglang

    imported = time.perf_counter()
    engine = sglang.Engine(model_path=str(options.model), **json.loads(options.engine))
    ready = time.perf_counter()
    rng = random.Random(0)  # noqa: S311

    def prompt(length: int) -> list[int]:
        return [rng.randrange(10, 30000) for _ in range(length)]

    greedy = []
    for length in (300, 3000, 9000):
        parameters = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answer = engine.generate(input_ids=prompt(length), sampling_params=parameters, return_logprob=True)
        greedy.append(
            {
                "tokens": answer["output_ids"],
                "logprobs": [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            }
        )
    times: dict[str, Any] = {}
    for length in [int(text) for text in options.lengths.split(",") if text]:
        streams = [stream(engine, prompt(length)) for _ in range(options.repeats + 1)][1:]  # the first one warms up
        times[str(length)] = {
            "prefill_ms": [1e3 * item[0] for item in streams],
            "decode_ms": [1e3 * item[1] for item in streams],
        }
    serving = served(engine)
    engine.shutdown()
    return {"import_s": imported - begin, "start_s": ready - imported, **serving, "greedy": greedy, "times": times}


def served(engine: Any) -> dict[str, Any]:
    """Return the pattern that an engine's plugin has proven, how prompts attend so far, and what other plugins say."""
    state = engine.get_server_info()["internal_states"][0]
    found, others = state.get(KEY, {}), {name: value for name, value in state.items() if name.startswith(KEY + "_")}
    serves = found.get("pattern") if found.get("proven") else None
    grouped, unions = found.get("grouped_layers", 0), found.get("union_passes")
    return {"serves": serves, "grouped": grouped, "unions": unions, "others": others}


def stream(engine: Any, ids: list[int], steps: int = 40) -> tuple[float, float]:
    """Return the seconds to the first token, and for each later one."""
    begin = time.perf_counter()
    seen = []
    parameters = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    for answer in engine.generate(input_ids=ids, sampling_params=parameters, stream=True):
        seen.append((time.perf_counter() - begin, answer["meta_info"]["completion_tokens"]))
    return seen[0][0], (seen[-1][0] - seen[2][0]) / (seen[-1][1] - seen[2][1])


def table(results: list[dict[str, Any]], pairs: list[tuple[str, str]]) -> Iterator[str]:
    """Yield ratios with their spread, and how far the greedy tokens agree."""
    for base, tested in pairs:
        rounds = {name: [item for item in results if item["condition"] == name] for name in (base, tested)}
        for length in rounds[base][0]["times"]:
            for kind in ("prefill_ms", "decode_ms"):
                fastest = {name: [min(item["times"][length][kind]) for item in items] for name, items in rounds.items()}
                ratio = min(fastest[tested]) / min(fastest[base])
                spread = max((max(values) - min(values)) / min(values) for values in fastest.values())
                cells = "; ".join(f"{name} {', '.join(f'{v:.3f}' for v in values)}" for name, values in fastest.items())
                yield f"{length:>7} {kind:<10} {tested}/{base} {ratio:.4f}, rounds differ by {spread:.1%} ({cells})"
        for name, items in rounds.items():
            yield f"start {name}: " + ", ".join(f"{item['start_s']:.1f} s" for item in items)
        for left, right in ((base, base), (tested, tested), (base, tested)):
            first, second = rounds[left][0], rounds[right][-1]
            if first is not second:
                yield f"greedy tokens {left} and {right}: equal for {agreement(first, second)} of 24"


def agreement(first: dict[str, Any], second: dict[str, Any]) -> list[int]:
    """Count the tokens of each prompt that are equal from the start."""
    found = []
    for left, right in zip(first["greedy"], second["greedy"], strict=True):
        pairs = list(zip(left["tokens"], right["tokens"], strict=True))
        found.append(next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs)))
    return found


if __name__ == "__main__":
    main()
