"""Measure what each kind of layer costs in prompts and while decoding, and write a table. Needs SGLang and a GPU.

    python -m scripts.bench.serving.prices --model GLM-5-rank --name glm-5-tp8 --output glm-5-tp8.json

An engine whose layers are of all kinds (`F` and `S`, exact and in blocks) times them one by one, see `layer_times`.
Beside it, in turns, whole prompts of SGLang without the plugin and of patterns given as NAME=LETTERS run, with which
the sums of the table are compared. Lengths are multiples of the chunk; the shorter ones are parts of the longest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from indexcache_search.strategies.budget.table import LatencyTable
from scripts.bench.serving.conditions import PLAIN, Condition, ports
from scripts.bench.serving.engines import Engine
from scripts.bench.serving.layer_times import cumulated
from sglang_indexcache import Pattern
from sglang_indexcache.pattern.indexer_setting import QUERIES

KINDS = (1, *QUERIES)
SCHEMA = "indexcache-prices/v1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checks", nargs="*", type=Condition.parse, help="NAME=LETTERS, whole prompts to compare the table with"
    )
    parser.add_argument("--model", required=True, type=Path, help="folder with config.json, 14 layers or more")
    parser.add_argument("--name", required=True, help="name of the table")
    parser.add_argument("--lengths", default="16384,32768,65536,131072", help="tokens of the prompts, the longest last")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--engine", default="{}", help="more arguments of sglang.Engine, JSON")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    config, engine = json.loads((options.model / "config.json").read_text()), json.loads(options.engine)
    lengths, chunk = [int(item) for item in options.lengths.split(",")], engine["chunked_prefill_size"]
    pattern = of_all_kinds(config["num_hidden_layers"])
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.jsonl"
        hooked = argparse.Namespace(
            **vars(options) | {"engine": json.dumps(engine | {"forward_hooks": hooks(times, chunk)})}
        )
        places = ports()
        engines = {"kinds": Engine(Condition("kinds", pattern), hooked, Path(folder), next(places))}
        engines |= {
            condition.name: Engine(condition, options, Path(folder), next(places))
            for condition in (Condition(PLAIN, None), *options.checks)
        }
        for name, item in engines.items():
            answer = item.ready()
            print(f"{name}: up in {answer['start_s']:.0f} s, serves {answer['serves']}", flush=True)
        whole: dict[str, dict[int, dict[str, list[float]]]] = {name: {} for name in engines}
        for length in lengths:
            for turn in range(options.rounds + 1):  # the first one warms up
                for name, item in engines.items():
                    answer = item.ask(cell=str(length), turn=turn)
                    if "error" in answer:
                        raise SystemExit(f"{name}, {length} tokens: {answer['error']}")
                    if turn:
                        kept = whole[name].setdefault(length, {"prefill_ms": [], "decode_ms": []})
                        for kind, values in kept.items():
                            values.append(answer[kind])
            medians = {name: round(statistics.median(item[length]["prefill_ms"]), 1) for name, item in whole.items()}
            print(f"{length}: {medians}", flush=True)
        engines["kinds"].ask(cell="1024", turn=0)  # a chunk's times are written when the next one begins
        prompts = cumulated(times, lengths[-1] // chunk, options.rounds)
        for item in engines.values():
            item.end()
    content = table(options, config, engine, pattern, lengths, whole, prompts)
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    for check in content["checks"]:
        print(check, flush=True)


def of_all_kinds(layers: int) -> Pattern:
    """Return a pattern with an `F` of each kind and an `S` behind it, behind two layers that are not timed."""
    pattern = Pattern.parse("FF" + "FS" * len(KINDS) + "F" * (layers - 2 - 2 * len(KINDS)))
    for number, queries in enumerate(KINDS):
        if queries > 1:
            pattern = pattern.selecting_for(2 + 2 * number, queries)
    return pattern


def hooks(file: Path, chunk: int) -> list[dict[str, Any]]:
    """Return the value of `--forward-hooks`."""
    return [
        {
            "name": "times",
            "target_modules": ["model.embed_tokens", "model.layers.?", "model.layers.??"],
            "hook_factory": "scripts.bench.serving.layer_times:recorder",
            "config": {"file": str(file), "tokens": chunk},
        }
    ]


def table(
    options: argparse.Namespace,
    config: dict[str, Any],
    engine: dict[str, Any],
    pattern: Pattern,
    lengths: list[int],
    whole: dict[str, dict[int, dict[str, list[float]]]],
    prompts: list[list[list[float]]],
) -> dict[str, Any]:
    """Return the table: milliseconds of a layer in a prompt, and in a decoding step behind it."""
    import sglang
    import torch
    import triton

    layers, chunk = config["num_hidden_layers"], engine["chunked_prefill_size"]

    def layer_ms(layer: int) -> list[float]:
        return [
            round(statistics.median(prompt[layer][length // chunk - 1] for prompt in prompts), 3) for length in lengths
        ]

    def median(name: str, kind: str) -> list[float]:
        return [statistics.median(whole[name][length][kind]) for length in lengths]

    full = {queries: layer_ms(2 + 2 * number) for number, queries in enumerate(KINDS)}
    shared = {queries: layer_ms(3 + 2 * number) for number, queries in enumerate(KINDS)}
    rest = [total - layers * each for total, each in zip(median(PLAIN, "prefill_ms"), full[1], strict=True)]
    steps = list(zip(median(PLAIN, "decode_ms"), median("kinds", "decode_ms"), strict=True))
    saved = [(plain - kinds) / len(pattern.shared_layers) for plain, kinds in steps]
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "name": options.name,
        "device": torch.cuda.get_device_name(),
        "versions": {"sglang": sglang.__version__, "torch": torch.__version__, "triton": triton.__version__},
        "date": datetime.now(UTC).date().isoformat(),
        "heads": config["num_attention_heads"],
        "index_heads": config["index_n_heads"],
        **{key: config[key] for key in ("index_topk", "index_head_dim", "kv_lora_rank", "qk_rope_head_dim")},
        "kv_cache_dtype": engine["kv_cache_dtype"],
        "chunk": chunk,
        "layers": layers,
        "contexts": lengths,
        "prompt": {
            "full_ms": full,
            "shared_ms": shared,
            "rest_ms": [round(value, 3) for value in rest],
        },
        "decode": {
            "full_ms": [round(plain / layers, 4) for plain, _ in steps],
            "shared_ms": [round(plain / layers - each, 4) for (plain, _), each in zip(steps, saved, strict=True)],
        },
        "checks": [],
    }
    prices = LatencyTable.model_validate(content)
    for condition in options.checks:
        for length in lengths:
            values = whole[condition.name][length]["prefill_ms"]
            measured = statistics.median(values)
            content["checks"].append(
                {
                    "pattern": condition.pattern.letters,
                    "context": length,
                    "measured_ms": round(measured, 1),
                    "expected_ms": round(prices.at(length).prompt_ms(condition.pattern), 1),
                    "plain_ms": round(statistics.median(whole[PLAIN][length]["prefill_ms"]), 1),
                    "spread": round((max(values) - min(values)) / measured, 4),
                }
            )
    return content


if __name__ == "__main__":
    main()
