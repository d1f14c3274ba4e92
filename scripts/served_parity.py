"""Does SGLang decode a trained dense model over chosen pages as the reference engine does? Needs SGLang; runs on a CPU.

    scripts/run.sh --sglang python -m scripts.served_parity --model build/smollm2/model \\
        --pattern build/smollm2/p16/pattern.yaml --data build/smollm2/held_out-code.jsonl --lengths 600,1500

Prompts are the beginnings of rows of `input_ids`, read as one batch and then decoded greedily, by SGLang alone and with
the pattern. Prints, for each: whether the logprobs of the prompt are SGLang's own bit for bit, and the largest
difference of a logprob from transformers with pages, from stock to transformers, and that the pages make.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from indexcache_search.hf.pages import apply_page_roles
from sglang_indexcache import PatternFile
from tests.live.inprocess import Served, generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pattern", type=Path, required=True)
    parser.add_argument("--data", type=Path, action="append", required=True, help="rows of input_ids; repeatable")
    parser.add_argument("--lengths", default="600,1500", help="of prompts; one of each file")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    texts = [json.loads(path.open().readline())["input_ids"] for path in options.data]
    prompts = [text[:length] for text in texts for length in lengths]
    pattern = PatternFile.load(options.pattern).as_pattern()
    with tempfile.TemporaryDirectory() as folder:
        stock = generate(options.model, None, prompts, options.steps, Path(folder))
        served = generate(options.model, str(options.pattern), prompts, options.steps, Path(folder))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="eager").eval()

    def logprobs(one: Served) -> Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([one.ids[:-1]]), use_cache=False).logits[0]
        found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(one.ids[1:])[:, None])[:, 0]
        return found

    def distance(one: Served, expected: Tensor) -> float:
        return float((torch.tensor(one.logprobs) - expected).abs().max())

    for one, plain in zip(served, stock, strict=True):
        read = torch.arange(len(one.ids) - 1)[None] < one.prompt
        with apply_page_roles(model, pattern, prompt=read):
            pages = logprobs(one)
        same = one.logprobs[: one.prompt] == plain.logprobs[: plain.prompt]
        print(
            f"{one.prompt} tokens: prompt {'the same bits' if same else 'differs'},"
            f" served {distance(one, pages):.1e}, stock {distance(plain, logprobs(plain)):.1e},"
            f" pages change {distance(one, logprobs(one)):.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
