"""The longest context that the transformers engine evaluates, with and without the kernels.

    python -m scripts.bench.search.context --lengths 4096,8192,16384,32768,65536,131072

One sequence of random tokens through a random model of GLM-5's shapes (64 heads, latent 512 + 64, 32 index heads,
index_topk 2048, mixture of experts) with 12 layers and hidden size 2,048, under a 1/4 pattern in bfloat16. Each
attention goes on until it is out of memory. Also the demo model's held-out loss with both, in float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_search import demo
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.hf.loading import describe_model, set_quiet
from scripts.bench.search.sets import demo_sets
from scripts.bench.timing import timed
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe

CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": 202752,
    "pad_token_id": 0,
}
PATTERN = Pattern("FSSSFSSSFSSS")


def random_model() -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.bfloat16).eval()


def one_sequence(length: int) -> TokenSet:
    tokens = np.random.default_rng(length).integers(0, CONFIG["vocab_size"], (1, length)).astype(np.int32)
    scored = np.arange(length)[None] > CONFIG["index_topk"]
    return TokenSet(tokens, scored, np.zeros(1, dtype=np.int64), ("random",))


def evaluate(engine: TransformersEngine, patterns: list[Pattern], data: TokenSet) -> tuple[list[Evaluation], float]:
    """Return evaluations, and their seconds."""
    return timed(lambda: list(engine.evaluate(patterns, data, "nll")))


def longest(lengths: list[int]) -> list[dict[str, Any]]:
    model, description, found = random_model(), describe(CONFIG, "glm5-12"), []
    weights = torch.cuda.memory_allocated()
    for attention in ("naive", "kernels"):
        engine = TransformersEngine(model, description, prefix_cache_gb=0, attention=attention)
        for length in lengths:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            row: dict[str, Any] = {"attention": attention, "length": length}
            try:
                for _ in range(2 if attention == "kernels" else 1):  # the first compiles
                    [evaluation], row["seconds"] = evaluate(engine, [PATTERN], one_sequence(length))
                row["loss"] = sum(evaluation.losses) / sum(evaluation.tokens)
                row["gib"] = (torch.cuda.max_memory_allocated() - weights) / 2**30
            except SearchError as error:
                row["error"] = str(error)
            found.append(row)
            print(json.dumps(row), flush=True)
            if "error" in row:
                break
    return found


def demo_losses() -> list[dict[str, Any]]:
    name, found = str(demo.MODEL), []
    description = describe_model(name)
    data, _ = demo_sets(name, 512, calibration=48, held_out=48, sources=demo.EVALUATION)
    pattern = Pattern("FS" * (description.num_layers // 2))
    for dtype in ("float32", "bfloat16"):
        for attention in ("naive", "kernels"):
            engine = TransformersEngine.load(name, "cuda", dtype, 32, 0, attention=attention)
            for _ in range(2):
                evaluations, seconds = evaluate(engine, [description.native, pattern], data)
            row: dict[str, Any] = {"model": "demo", "dtype": dtype, "attention": attention, "seconds": seconds}
            row["losses"] = [sum(item.losses) / sum(item.tokens) for item in evaluations]
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,12288,16384,32768,65536,131072")
    parser.add_argument("--output", type=Path, default=Path("bench_context.json"))
    options = parser.parse_args()
    set_quiet()
    results = demo_losses() + longest([int(item) for item in options.lengths.split(",")])
    versions = {name: version(name) for name in ("torch", "transformers", "triton")}
    about = {"device": torch.cuda.get_device_name(), "versions": versions}
    options.output.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
