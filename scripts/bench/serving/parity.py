r"""Parity of SGLang and the reference engine on a trained dense model over selected pages. Needs SGLang; runs on a CPU.

    scripts/run.sh --sglang python -m scripts.bench.serving.parity --model build/smollm2/model \
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

from scripts.tools.dense_reference import decoded, distance, logprobs, reference
from scripts.tools.inprocess import generate
from sglang_indexcache import PatternFile


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
    model = reference(options.model)
    for one, plain in zip(served, stock, strict=True):
        same = one.logprobs[: one.prompt] == plain.logprobs[: plain.prompt]
        print(
            f"{one.prompt} tokens: prompt {'the same bits' if same else 'differs'},"
            f" served {distance(one, decoded(model, pattern, one)):.1e},"
            f" stock {distance(plain, logprobs(model, plain.ids)):.1e},"
            f" pages change {distance(one, logprobs(model, one.ids)):.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
