"""Hooks for SGLang's `--forward-hooks` that time the layers of each chunk of a prompt on the GPU.

    {"name": "times",
     "target_modules": ["model.embed_tokens", "model.layers.?", "model.layers.??",
                        "model.layers.?.self_attn", "model.layers.??.self_attn"],
     "hook_factory": "scripts.bench.serving.layer_times:recorder",
     "config": {"file": "/tmp/times.jsonl", "tokens": 8192}}

Every chunk of at least so many tokens becomes a line of the file when the next forward pass begins: its tokens, and for
each layer the milliseconds from the end of the one before to its own end, idle gaps included (`ms`), and those of them
that are behind its attention (`behind_ms`): experts, or a dense MLP, with what ranks send each other. Only the first
rank writes. Prompts must not run in CUDA graphs, in which hooks do not run. Without a GPU the host's clock counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed


class Mark(Protocol):
    """A point in time."""

    def query(self) -> bool:
        """Return whether it is over."""

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds to a later one."""


class HostMark:
    """A point in time on a device that does what it is told before the host goes on."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Return whether it is over."""
        return True

    def elapsed_time(self, later: HostMark, /) -> float:
        """Return the milliseconds to a later one."""
        return 1e3 * (later._at - self._at)


def _cuda_mark() -> Mark:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def recorder(config: dict[str, Any], clock: Callable[[], Mark] | None = None) -> Callable[..., None]:
    """Return a forward hook for the embedding, all layers and their attention."""
    file, chunks = Path(config["file"]), list[tuple[int, list[Mark]]]()
    on_gpu = torch.cuda.is_available()
    mark = clock or (_cuda_mark if on_gpu else HostMark)
    writes = not distributed.is_initialized() or distributed.get_rank() == 0

    def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not writes or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        if not hasattr(module, "layer_id"):  # the embedding: a chunk begins
            while chunks and chunks[0][1][-1].query():
                tokens, marks = chunks.pop(0)
                if tokens >= config["tokens"]:
                    with file.open("a") as stream:
                        stream.write(json.dumps({"tokens": tokens, **_by_layer(marks)}) + "\n")
            chunks.append((inputs[0].numel(), []))
        if chunks:
            chunks[-1][1].append(mark())

    return hook


def _by_layer(marks: list[Mark]) -> dict[str, list[float]]:
    parts = [first.elapsed_time(second) for first, second in pairwise(marks)]
    if len(parts) % 2:
        raise ValueError(f"found {len(parts)} times, expected two of each layer: its attention and the layer")
    behind = parts[1::2]
    return {"ms": [before + after for before, after in zip(parts[::2], behind, strict=True)], "behind_ms": behind}


def cumulated(file: Path, chunks: int, prompts: int, kind: str = "ms") -> list[list[list[float]]]:
    """Read the times of the last prompts that the file has.

    Args:
        file: as `recorder` wrote it.
        chunks: whole chunks of each of them.
        prompts: number of prompts.
        kind: `ms` or `behind_ms`.

    Returns:
        For each prompt and each layer the milliseconds from its begin to the end of every chunk.

    Raises:
        SystemExit: if there are fewer chunks.
    """
    lines = [json.loads(line)[kind] for line in file.read_text().splitlines()] if file.exists() else []
    if len(lines) < prompts * chunks:
        raise SystemExit(
            f"{file} has {len(lines)} chunks, expected {prompts * chunks}: do prompts run in CUDA graphs,"
            " where hooks don't?"
        )
    lines = lines[-prompts * chunks :]
    return [
        [list(accumulate(layer)) for layer in zip(*lines[begin : begin + chunks], strict=True)]
        for begin in range(0, len(lines), chunks)
    ]
