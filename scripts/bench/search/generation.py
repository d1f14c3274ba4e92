r"""Greedy generation over selected pages: how much of a passage of the prompt a dense model still writes down.

Teacher forcing hides drift, so here the model goes on from what it wrote itself. Each prompt holds a passage somewhere,
and ends with its first tokens; what should follow is the rest of it. Prints, by pattern, the share of the tokens that
are the passage's, and how many come before the first that is not the dense model's own.

    python -m scripts.bench.search.generation --data build/smollm2/held_out-recall.jsonl --model build/smollm2/model \
        --pattern searched=build/smollm2/p16/pattern.yaml --pattern paper=DDDSSSSSSSSSSSDSSSSSSSDSSSSSSS --pages 16
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.hf.prompt_cache import PromptCache
from indexcache_dense.selection_choice import SelectionChoice
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec, split_name


def read(path: Path, given: int, steps: int) -> tuple[Tensor, Tensor]:
    """Read prompts `[rows, tokens]` with the first `given` tokens of a reply, and its next tokens, `[rows, steps]`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ids = torch.tensor([row["input_ids"] for row in rows])
    start = rows[0]["loss_mask"].index(1) + given
    if start + steps > ids.shape[1]:
        raise SystemExit(f"{path}: replies have {ids.shape[1] - start} tokens behind the given ones, expected {steps}")
    return ids[:, :start], ids[:, start : start + steps]


@torch.inference_mode()
def generate(model: Any, beginnings: PromptCache, pattern: Pattern, prompts: Tensor, steps: int) -> Tensor:
    """Generate the likeliest tokens, `[rows, steps]`; the prompt is read with full attention."""
    found = []
    with beginnings.read("prompts", prompts[:, :-1]) as (cache, _):
        with apply_roles(model, Pattern.full(len(pattern), selection=pattern.selection)):
            token = model(input_ids=prompts[:, -1:], past_key_values=cache).logits[:, -1:].argmax(-1)
        with apply_page_roles(model, pattern):
            for _ in range(steps):
                found.append(token)
                token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
    return torch.cat(found, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="rows of input_ids and loss_mask, replies recalled")
    parser.add_argument("--pattern", action="append", required=True, help="NAME=FILE or NAME=letters; repeatable")
    parser.add_argument("--pages", type=int, default=16)
    parser.add_argument("--given", type=int, default=32, help="tokens of the passage at the end of the prompt")
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    [selection] = SelectionChoice(pages=(options.pages,)).selections()
    engine = TransformersEngine.load(options.model, options.device, selection=selection)
    model, native = engine.torch_model, engine.model.native
    prompts, expected = (part.to(model.device) for part in read(options.data, options.given, options.steps))
    named = {"dense": native}
    for name, text in map(split_name, options.pattern):
        named[str(name or text)] = replace(PatternSpec.read(text, selection).pattern(engine.model), selection=selection)
    beginnings, dense = PromptCache(model, float("inf")), None
    print(f"{len(prompts)} prompts of {prompts.shape[1]} tokens, {options.steps} generated, {selection}")
    print("| pattern | tokens of the passage | before the first that dense would not write |\n|---|---|---|")
    for name, pattern in named.items():
        found = generate(model, beginnings, pattern, prompts, options.steps)
        dense = found if dense is None else dense
        right = (found == expected).double().mean(1)
        alike = (found == dense).double().cumprod(1).sum(1)
        error = right.std() / len(right) ** 0.5
        print(f"| {name} | {right.mean():.3f} ±{error:.3f} | {', '.join(str(int(n)) for n in alike)} |", flush=True)


if __name__ == "__main__":
    main()
