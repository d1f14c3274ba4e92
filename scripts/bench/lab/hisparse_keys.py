"""Measure how many tokens HiSparse holds without the index keys of S layers: by sizes alone, or on one GPU.

    python -m scripts.bench.lab.hisparse_keys --sizes                   # GLM-5's shapes, SGLang's own arithmetic, CPU
    python -m scripts.bench.lab.hisparse_keys --output build/hisparse-keys                        # one GPU, bfloat16
    python -m scripts.bench.lab.hisparse_keys --output build/hisparse-keys --ratio 10 --mem-fraction 0.12
    python -m scripts.bench.lab.hisparse_keys --output build/hisparse-keys --exact --conditions kept,freed  # tokens

Three conditions: all layers F; 1/4 as SGLang serves it (`kept`); 1/4 without index keys of S layers (`freed`). --sizes
prints bytes a device token and tokens in --memory, by `DefaultPoolConfigurator`, for a whole GLM-5 with an fp8 cache
and the published 22 of 78 layers F.

The run has 12 layers of one TP-8 rank (random weights, as `scripts.bench.lab.hisparse`), an engine for each condition
and round, rounds mirrored. It prints `max_total_num_tokens`, what `/server_info` says of the keys, and milliseconds a
step. SGLang's own top-k is not repeatable, so that an engine's replies differ from its own the next time: with --exact
all engines have PyTorch's, and it says whether `kept` and `freed` give the same tokens; exit code 1 if not, or if one
does not repeat itself. HiSparse pins host memory for --ratio times the device's tokens: with --mem-fraction 0.2 some
36 GB at 2, with 0.12 some 60 GB at 10.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from indexcache_lab.hisparse.plugin import VARIABLE
from indexcache_published.known import FOLDER
from scripts.bench import child
from scripts.bench.lab.hisparse import ENGINE, LAYERS, LETTERS, STEPS, decode, make
from scripts.bench.serving.rank_model import rank_config, write
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.pattern_file.file import PatternFile

KEYS, GLM_5, PAGE = "indexcache_keys", 78, 64
CONDITIONS = ("F", "kept", "freed")
PUBLISHED = FOLDER / "glm-5-quarter.yaml"


def model_of(options: argparse.Namespace) -> Path:
    """Return the folder of the model: a whole GLM-5's config.json for --sizes, else the twelve layers that run."""
    return Path(options.output) / ("sizes" if options.sizes else "model")


def start(options: argparse.Namespace, condition: str, letters: str, arguments: dict[str, Any]) -> Any:
    """Start a measurement in a process of its own."""
    model = model_of(options)
    file = write_pattern(Pattern(letters), model, options.output / f"{condition}.yaml")
    words = ["--child", "--output", str(options.output), "--engine", json.dumps(arguments)]
    words += [*(["--sizes"] if options.sizes else []), "--memory", str(options.memory)]
    words += ["--batch", str(options.batch), "--context", str(options.context)]
    os.environ[VARIABLE] = "1" if condition == "freed" else "0"
    if options.exact:
        os.environ["SGLANG_DSA_FUSE_TOPK"] = "false"
    return child.start("scripts.bench.lab.hisparse_keys", words, file)


def hisparse(options: argparse.Namespace, ratio: int) -> dict[str, Any]:
    config = {"top_k": 2048, "device_buffer_size": 4096, "host_to_device_ratio": ratio}
    return {"enable_hisparse": True, "disable_radix_cache": True, "hisparse_config": json.dumps(config)}


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return what SGLang's own class counts for one device token, and how many fit."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    arguments = ServerArgs(model_path=str(model_of(options)), skip_tokenizer_init=True, **json.loads(options.engine))
    arguments.resolve_once()
    rank = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
    one_batch.publish(arguments, role="scheduler", ranks=rank)

    import torch
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    layers = SimpleNamespace(start_layer=0, end_layer=GLM_5, num_effective_layers=GLM_5)
    kvc = SimpleNamespace(
        model_config=ModelConfig.from_server_args(arguments),
        server_args=arguments,
        kv_cache_dtype=torch.float8_e4m3fn,
        kv_cache_dtype_str="fp8_e4m3",
        layer_info=layers,
        spec_algorithm=SpeculativeAlgorithm.NONE,
        is_draft_worker=False,
        use_mla_backend=True,
        mambaish_config=None,
        kv_shard_size=1,
        page_size=PAGE,
        pp_size=1,
    )
    found = DefaultPoolConfigurator(kvc)
    room = found.calculate_pool_sizes(int(options.memory * 2**30), PAGE)
    return {"bytes": found._cell_size, "tokens": room.max_total_num_tokens}


def print_sizes(options: argparse.Namespace) -> None:
    write(model_of(options), rank_config(ranks=1, gpus=1, heads=None, layers=GLM_5, dtype="bf16"))
    quarter = PatternFile.load(PUBLISHED).as_pattern().letters
    common = {
        "device": options.device,
        "attention_backend": "dsa",
        "dsa_prefill_backend": "flashmla_kv",
        "dsa_decode_backend": "flashmla_kv",
        "kv_cache_dtype": "fp8_e4m3",
        "dtype": "bfloat16",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "max_running_requests": 8,
    }
    print(f"| host ratio | | bytes a device token | tokens in {options.memory:g} GiB | |\n| -: | -- | -: | -: | -: |")
    for ratio in map(int, options.ratio.split(",")):
        first = 0
        for condition in options.conditions:
            letters = "F" * GLM_5 if condition == "F" else quarter
            process = start(options, condition, letters, {**common, **hisparse(options, ratio)})
            found = child.result_of(process)[0]
            first = first or found["tokens"]
            gain = f"{found['tokens'] / first:.2f}x"
            print(f"| {ratio} | {condition} | {found['bytes']:,} | {found['tokens']:,} | {gain} |", flush=True)


def serve(options: argparse.Namespace) -> dict[str, Any]:
    """Run one engine: its room, its keys, replies and steps."""
    import sglang

    engine = sglang.Engine(model_path=str(model_of(options)), **json.loads(options.engine))
    info = engine.get_server_info()
    found = {"tokens": info["max_total_num_tokens"], "keys": info["internal_states"][0].get(KEYS)}
    found |= decode(engine, options)
    engine.shutdown()
    return found


def measure(options: argparse.Namespace) -> None:
    make(model_of(options))
    [ratio] = map(int, options.ratio.split(","))
    engine = ENGINE | {"max_running_requests": options.batch, "cuda_graph_bs_decode": [1, options.batch]}
    engine |= {"context_length": options.context + STEPS + PAGE, "mem_fraction_static": options.mem_fraction}
    engine |= {"dsa_topk_backend": "torch"} if options.exact else {}
    written = options.output / f"keys-{ratio}{'-exact' if options.exact else ''}.json"
    results = []
    for turn in range(options.rounds):
        for condition in options.conditions[:: 1 if turn % 2 == 0 else -1]:
            letters = LETTERS["F" if condition == "F" else "FSSS"]
            process = start(options, condition, letters, engine | hisparse(options, ratio))
            results.append({"condition": condition, **child.result_of(process)[0]})
            shown = {key: value for key, value in results[-1].items() if key != "replies"}
            print(json.dumps(shown), flush=True)
            written.write_text(json.dumps(results) + "\n")
    print(f"\n{LAYERS} layers, host ratio {ratio}\n\n| | tokens | | step, ms |\n| -- | -: | -: | -: |")
    by = {name: [item for item in results if item["condition"] == name] for name in options.conditions}
    for name, found in by.items():
        steps = ", ".join(f"{item['step_ms']:.2f}" for item in found)
        gain = found[0]["tokens"] / by[options.conditions[0]][0]["tokens"]
        print(f"| {name} | {found[0]['tokens']:,} | {gain:.2f}x | {steps} |")
    if {"kept", "freed"} <= by.keys():
        said, differs = verdict([*by["kept"], *by["freed"]], options.exact)
        print(f"\nreplies of kept and freed: {said}")
        sys.exit(differs)


def verdict(results: list[dict[str, Any]], exact: bool) -> tuple[str, bool]:
    """Say whether engines gave the same replies, and whether that is a failure."""
    if not all(item["repeats"] for item in results):
        advice = "" if exact else "; try --exact"
        return f"not compared, an engine's own differ from one time to the next{advice}", exact
    same = all(item["replies"] == results[0]["replies"] for item in results)
    return ("the same tokens", False) if same else ("DIFFERENT", True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/hisparse-keys"))
    parser.add_argument("--sizes", action="store_true", help="of a whole GLM-5, without a GPU")
    parser.add_argument("--memory", type=float, default=40, help="GiB for the pool, with --sizes")
    parser.add_argument("--device", default="cpu", help="with --sizes")
    parser.add_argument("--conditions", default=",".join(CONDITIONS), help="which engines")
    parser.add_argument("--ratio", help="host tokens for each device token; 2,10 with --sizes, else 2")
    parser.add_argument("--mem-fraction", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="with a top-k that repeats itself, to compare tokens")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="{}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ratio = options.ratio or ("2,10" if options.sizes else "2")
    options.conditions = tuple(options.conditions.split(","))
    if unknown := set(options.conditions) - set(CONDITIONS):
        parser.error(f"there is no {min(unknown)}, expected {', '.join(CONDITIONS)}")
    if options.child:
        child.give(sizes(options) if options.sizes else serve(options))
    options.output.mkdir(parents=True, exist_ok=True)
    if options.sizes:
        print_sizes(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
