"""Hooks for SGLang's `--forward-hooks` that time the layers of each chunk of a prompt on the GPU.

    {"name": "times", "target_modules": ["model.embed_tokens", "model.layers.?", "model.layers.??"],
     "hook_factory": "scripts.bench.serving.layer_times:recorder",
     "config": {"file": "/tmp/times.jsonl", "tokens": 8192}}

Every chunk of at least so many tokens becomes a line of the file when the next forward pass begins: its tokens, and the
milliseconds from the end of one layer to the end of the next, idle gaps included.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch


def recorder(config: dict[str, Any]) -> Callable[..., None]:
    """Return a forward hook for the embedding and all layers."""
    file, chunks = Path(config["file"]), list[tuple[int, list[torch.cuda.Event]]]()

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        if not hasattr(module, "layer_id"):  # the embedding: a chunk begins
            while chunks and chunks[0][1][-1].query():  # type: ignore[no-untyped-call]
                tokens, events = chunks.pop(0)
                line = {"tokens": tokens, "ms": [first.elapsed_time(second) for first, second in pairwise(events)]}
                if tokens >= config["tokens"]:
                    with file.open("a") as stream:
                        stream.write(json.dumps(line) + "\n")
            chunks.append((inputs[0].numel(), []))
        if chunks:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            chunks[-1][1].append(event)

    return hook


def cumulated(file: Path, chunks: int, prompts: int) -> list[list[list[float]]]:
    """Read the times of the last prompts that the file has.

    Args:
        file: as `recorder` wrote it.
        chunks: whole chunks of each of them.
        prompts: number of prompts.

    Returns:
        For each prompt and each layer the milliseconds from its begin to the end of every chunk.
    """
    lines = [json.loads(line)["ms"] for line in file.read_text().splitlines()][-prompts * chunks :]
    return [
        [list(accumulate(layer)) for layer in zip(*lines[begin : begin + chunks], strict=True)]
        for begin in range(0, len(lines), chunks)
    ]
