"""Seconds and memory of a training step of a long sequence, on one GPU or several.

    python -m scripts.bench.search.training
    torchrun --nproc-per-node 2 -m scripts.bench.search.training

A random model of GLM-5's shapes (see `context`) with 12 layers, hidden size 2,048 and 16 experts, 2.86 billion
weights, trains uniform 1/4 on random sequences of 32,768 tokens, gradient checkpointing on in the sparse stage. One
line a step: losses, seconds, peak memory; then the estimate. Any number of processes starts from the same weights and
data, so their losses can be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_search.data.tokens import TokenSet
from indexcache_search.hf.loading import set_quiet
from indexcache_train.distill import memory
from indexcache_train.distill.settings import DistillSettings, Stage
from indexcache_train.distill.task import StageTask
from indexcache_train.training.processes import Processes, joined
from scripts.bench.search.context import CONFIG, PATTERN
from scripts.bench.timing import timed

SHAPES: dict[str, Any] = {**CONFIG, "n_routed_experts": 16}


def sequences(number: int, length: int, seed: int) -> TokenSet:
    tokens = np.random.default_rng(seed).integers(1, SHAPES["vocab_size"], (number, length)).astype(np.int32)
    scored = np.ones_like(tokens, dtype=bool)
    return TokenSet(tokens, scored, np.zeros(number, dtype=np.int64), ("random",))


def model_of(processes: Processes) -> Any:
    """Make the same random weights in every run; none in processes after the first."""
    torch.manual_seed(0)
    with torch.device(processes.device if processes.first else "meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES), dtype=torch.bfloat16)


def measure(processes: Processes, stage: Stage, options: argparse.Namespace) -> None:
    steps = {"warmup_steps": options.steps, "sparse_steps": 0 if stage == "warmup" else options.steps}
    first = 0 if stage == "warmup" else options.steps
    settings = DistillSettings(
        pattern=PATTERN, batch_size=options.batch_size, ramp_steps=1, lr=1e-4, indexer_lr=1e-3, **steps
    )
    train = sequences(options.batch_size * options.steps, options.length, 1)
    model = model_of(processes)
    if stage == "sparse":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    need = memory.estimate(
        model.config,
        PATTERN,
        stage,
        seq_len=options.length,
        micro_batch_size=1,
        processes=processes.count,
        bfloat16=True,
        gradient_checkpointing=stage == "sparse",
        kernels=True,
    )
    task = StageTask(processes, model, settings, stage, train, held_out=train, kernels="auto")
    del model
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    task.model.train()
    for step in range(first, first + options.steps):
        record, seconds = timed(partial(task.step, step))
        if processes.first:
            seconds *= processes.count / options.batch_size
            peak = torch.cuda.max_memory_allocated() / 1e9
            names = ("step", "stage", "loss", "kl", "norm_indexers", "norm_body")
            found = {name: record[name] for name in names if name in record}
            print(json.dumps({**found, "seconds_a_sequence": round(seconds, 2), "peak_gb": round(peak, 1)}), flush=True)
    if processes.first:
        print(json.dumps({"stage": stage, "estimate_gb": round(need.total / 1e9, 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2, help="of all processes together")
    parser.add_argument("--warmup-only", action="store_true")
    options = parser.parse_args()
    set_quiet()
    with joined("auto", "bfloat16") as processes:
        if processes.first:
            versions = {"torch": torch.__version__, "processes": processes.count}
            print(json.dumps({"device": torch.cuda.get_device_name(), **versions}), flush=True)
        stages: tuple[Stage, ...] = ("warmup", "sparse")
        for stage in stages[: 1 if options.warmup_only else 2]:
            measure(processes, stage, options)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
