r"""Quality of answers that a dense model writes over selected pages, judged by attention to everything.

    python -m scripts.tools.smollm2 --output build/heads --seq-len 8192 --reply 256
    python -m scripts.bench.search.answers --model build/heads/model --prompts build/heads/held_out-*.jsonl \
        --device cuda --pages 32 --steps none,ema:0.9,bounded:2,refresh:16,nosa:8

Each prompt, the part of a row that its loss_mask leaves out, is answered by attention to everything, and with each
policy in all layers; the same random numbers draw the tokens. The model then reads every answer with attention to
everything: nats a token, less those of its own answer. What a policy writes may be as likely and still be another text,
so the tokens up to the first different one are shown, too, and the share of four-grams that the answer has before.
Means over prompts, ± standard errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import COMPRESSED_KEYS
from indexcache_dense.selection_choice import SelectionChoice
from indexcache_lab.eviction.heads import attach_saved
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf.loading import set_quiet
from indexcache_search.hf.roles import apply_roles
from scripts.tools.paired_table import shown
from sglang_indexcache import Pattern

PART = 1024  # tokens of a prompt that are read at once
EVERYTHING = "everything"


@dataclass(frozen=True)
class Answers:
    """The tokens written after each prompt, `[prompts, tokens]`, and how long a step of all of them took."""

    tokens: Tensor
    seconds_a_step: float


def read_prompts(paths: Sequence[Path], device: torch.device) -> Tensor:
    """Read the prompts of all rows, `[prompts, tokens]`, the last tokens of longer ones."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    prompts = [row["input_ids"][: row["loss_mask"].index(1)] for row in rows]
    least = min(map(len, prompts))
    return torch.tensor([prompt[-least:] for prompt in prompts], device=device)


@torch.inference_mode()
def read(model: Any, tokens: Tensor) -> tuple[DynamicCache, Tensor]:
    """Return the cache of prompts `[prompts, tokens]`, and the logits behind them, `[prompts, vocabulary]`."""
    rows, logits = [], []
    for row in tokens.split(1):
        cache = DynamicCache(config=model.config)
        for part in row.split(PART, 1):
            found = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        logits.append(found)
        rows.append(cache)
    together = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        keys, values = (torch.cat([getattr(row.layers[layer], name) for row in rows]) for name in ("keys", "values"))
        together.update(keys, values, layer)
    return together, torch.cat(logits)


def drawn(logits: Tensor, temperature: float, noise: torch.Generator) -> Tensor:
    """Draw a token for each row of `[prompts, vocabulary]`, the same for equal noise."""
    uniform = torch.rand(logits.shape, generator=noise).clamp_(1e-20, 1.0).to(logits.device)
    return (logits.float() / temperature - (-uniform.log()).log()).argmax(1)


@torch.inference_mode()
def answer(model: Any, prompts: Tensor, pattern: Pattern | None, options: argparse.Namespace) -> Answers:
    """Write answers to all prompts at once; without a pattern with attention to everything."""
    cache, logits = read(model, prompts)
    noise, found = torch.Generator().manual_seed(options.seed), []
    roles: AbstractContextManager[Any] = nullcontext() if pattern is None else apply_roles(model, pattern)
    with roles:
        for step in range(options.tokens):
            if step == 1:
                began = time.monotonic()
            found.append(drawn(logits, options.temperature, noise))
            if step + 1 < options.tokens:
                logits = model(found[-1][:, None], past_key_values=cache, use_cache=True).logits[:, -1]
    written = torch.stack(found, 1).cpu()
    return Answers(written, (time.monotonic() - began) / max(1, options.tokens - 2))


@torch.inference_mode()
def judged(model: Any, prompts: Tensor, answers: Tensor) -> list[float]:
    """Return the nats a token of each answer, with attention to everything."""
    found = []
    for prompt, tokens in zip(prompts.split(1), answers.to(prompts.device).split(1), strict=True):
        cache, logits = read(model, prompt)
        rest = model(tokens[:, :-1], past_key_values=cache, use_cache=True).logits[0]
        logprobs = torch.cat([logits, rest]).float().log_softmax(1)
        found.append(-logprobs.gather(1, tokens[0, :, None]).mean().item())
    return found


def repeated(tokens: Sequence[int], length: int = 4) -> float:
    """Return the share of runs of `length` tokens that occurred before."""
    runs = [tuple(tokens[first : first + length]) for first in range(len(tokens) - length + 1)]
    return 1 - len(set(runs)) / len(runs)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count tokens up to the first that differs."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def plans(options: argparse.Namespace, layers: int) -> dict[str, Pattern | None]:
    """Return the patterns that answer, by name."""
    steps = tuple(map(ReusePolicy.parse, options.steps.split(",")))
    selections = SelectionChoice(pages=(options.pages,), score=COMPRESSED_KEYS, steps=steps).selections()
    found: dict[str, Pattern | None] = {EVERYTHING: None}
    return found | {str(item.steps): Pattern(options.roles or "F" * layers, selection=item) for item in selections}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--steps", default="none,ema:0.9,bounded:2,refresh:16,nosa:8")
    parser.add_argument("--roles", help="a letter a layer; all F")
    parser.add_argument("--tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("bench_answers.json"))
    options = parser.parse_args()
    set_quiet()
    engine = TransformersEngine.load(options.model, options.device)
    attach_saved(engine)
    model = engine.torch_model
    prompts, found = read_prompts(options.prompts, model.device), {}
    print(f"{len(prompts)} prompts of {prompts.shape[1]} tokens, answers of {options.tokens}\n")
    titles = ["attends to", "nats a token", "over its own answers", "the same tokens first", "repeated four-grams"]
    print("| " + " | ".join([*titles, "ms a step"]) + " |\n|---" + "|---:" * len(titles) + "|")
    for name, pattern in plans(options, model.config.num_hidden_layers).items():
        answers = answer(model, prompts, pattern, options)
        tokens = answers.tokens.tolist()
        found[name] = {"tokens": tokens, "nats": judged(model, prompts, answers.tokens)}
        own = found[EVERYTHING]
        more = [mine - other for mine, other in zip(found[name]["nats"], own["nats"], strict=True)]
        same = [float(common(mine, other)) for mine, other in zip(tokens, own["tokens"], strict=True)]
        figures = (found[name]["nats"], more, [repeated(row) for row in tokens])
        nats, over, again = (shown(np.asarray(values)) for values in figures)
        cells = [name, nats, over, f"{statistics.mean(same):.0f}", again, f"{1e3 * answers.seconds_a_step:.0f}"]
        print("| " + " | ".join(cells) + " |", flush=True)
        options.output.write_text(json.dumps({"options": vars(options), "answers": found}, default=str) + "\n")


if __name__ == "__main__":
    main()
