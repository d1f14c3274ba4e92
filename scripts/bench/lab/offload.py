"""Tokens a second with the cache in host memory, beside full attention with all memory of a CUDA device.

    python -m scripts.bench.lab.offload --shape minicpm4-8b --context 65536 --batches 128,256 --misses 0,5,10,20
    python -m scripts.bench.lab.offload --context 16384,32768,65536,98304 --batches 8,16,32,64,128 --buffer 1 \
        --misses 1,6,12 --steps 16 --equal-memory --host-memory 128
    python -m scripts.bench.lab.offload --copies

Weights, keys and values are random. Full attention: as many requests as the device holds, by flashinfer. Offloaded:
`OffloadedDecoder`, all layers F, or one in four (`--shared`). The blocks that a layer requests are made up, so
that a given share of them is missing in every step; layers score and rank all the same. Host memory of requests
overlaps, in `--host-gb`, so that batches fit that the machine's memory does not hold; every copy reads it where it
would be. Both sides are one CUDA graph, and decode their own tokens; all runs are in one process.

--equal-memory also measures full attention with as many requests, rounded up, as the buffers of each batch would hold:
the budget of Table 5 in NOSI's paper (equation 10 of arXiv 2510.13602). --host-memory leaves out batches whose cache is
larger than that.

--copies measures `copy_blocks` alone, by the size of a block and how many are missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_dense.hf.patch_attention import AttentionCall, attending
from indexcache_dense.selection import Selection
from indexcache_lab.kernels import BlockBuffer, copy_blocks, swap_blocks
from indexcache_lab.offload.bandwidth import copy_bandwidth
from indexcache_lab.offload.decoder import OffloadedDecoder, PassedOn
from scripts.bench.shapes import SHAPES, config_of
from scripts.bench.timing import graph_ms, timed
from sglang_indexcache import Pattern

PAGE = 16  # of full attention's cache
SPARE = 8 << 30  # bytes of the device that caches don't take
WARM = 4


def new_model(shape: str, context: int, device: str) -> Any:
    """Make a model of random weights."""
    config = AutoConfig.for_model(**config_of(shape, context))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def lengths_of(requests: int, context: int) -> list[int]:
    """Return lengths around `context`, all different."""
    spread = context // 16
    return [context - spread // 2 + spread * number // requests for number in range(requests)]


def trace(rows: int, count: int, blocks: int, missing: float, steps: int, device: str) -> Tensor:
    """Return requested blocks, `[steps, rows, count]`, int32; a share `missing` replaces the oldest, in the mean."""
    generator = torch.Generator(device).manual_seed(0)
    phase, order = (torch.rand(rows, size, device=device, generator=generator) for size in (1, blocks))
    queue, number = order.argsort(1), torch.arange(count, device=device)  # [rows, blocks]
    found = []
    for step in range(steps):
        oldest = (step * missing * count + phase).long()  # [rows, 1], in the queue
        at = oldest + (number - oldest) % count
        found.append(queue.gather(1, at % blocks).sort(1).values.int())
    return torch.stack(found)


class Replaying(OffloadedDecoder):
    """A decoder that requests the blocks of a trace, over random keys and values."""

    def __init__(self, model: Any, pattern: Pattern, requests: int, room: int, host_bytes: int) -> None:
        self._host_bytes = host_bytes // len(pattern)
        super().__init__(model, pattern, requests, room, graph=model.device.type == "cuda")
        self._at = torch.zeros(1, dtype=torch.long, device=model.device)
        self._trace = torch.empty(0, dtype=torch.int32, device=model.device)  # [steps, selecting layers, B, K]

    def _check_memory(self) -> None:
        """Check nothing, since memory overlaps."""

    def _in_host_memory(self) -> Tensor:
        tokens = self._selection.page_tokens
        row, rows = self._blocks * tokens * self._dim, 2 * self._requests * self._groups
        held = min(rows * row, max(2 * row, self._host_bytes // 2))
        apart = (held - row) // (rows - 1) // 64 * 64
        memory = torch.empty(held, dtype=torch.bfloat16, pin_memory=self._model.device.type == "cuda")
        shape = (2, self._requests, self._groups, self._blocks, tokens, self._dim)
        block = tokens * self._dim
        return memory.as_strided(shape, (rows // 2 * apart, self._groups * apart, apart, block, self._dim, 1))

    def begin(self, lengths: list[int], missing: float, steps: int) -> None:
        """Begin requests of these lengths, with the blocks of their next steps."""
        for layer in self._layers:
            layer.device.normal_()
        choosers, count = self._choosers.values(), self._selection.pages - 1
        blocks = min(lengths) // self._selection.page_tokens - 1
        rows = len(choosers) * self._requests
        made = trace(rows, count, blocks, missing, steps, str(self._model.device))
        made = made.view(steps, len(choosers), self._requests, count)
        if self._trace.shape != made.shape:
            self._trace = made
        self._trace.copy_(made)  # a graph reads it where it is
        self._at.zero_()
        for number, chooser in enumerate(choosers):
            chooser.selector.compressed.normal_()
            chooser.selector.last.normal_()
            empty = BlockBuffer.empty(self._requests, self._slots, self._model.device)
            chooser.buffer.blocks.copy_(empty.blocks)
            chooser.buffer.order.copy_(empty.order)
            swap_blocks(made[0, number], torch.full_like(made[0, number, :, 0], -1), chooser.buffer)
        self.lengths = list(lengths)
        self._positions.copy_(torch.tensor(lengths))

    def _forward(self) -> None:
        super()._forward()
        self._at += 1

    def _requested(self, number: int, query: Tensor, scale: float) -> Tensor:
        super()._requested(number, query, scale)
        return self._trace[:, self._choosers[number].number].index_select(0, self._at)[0]


class Resident:
    """Full attention by flashinfer over a cache on the device; each decoded token replaces the newest."""

    def __init__(self, model: Any, lengths: list[int]) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        config, device = model.config, model.device
        self._model, groups, dim = model, config.num_key_value_heads, config.head_dim
        pages = torch.tensor([-(-length // PAGE) for length in lengths], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), pages.cumsum(0).int()])
        shape = (2, int(starts[-1]), PAGE, groups, dim)
        self._cache = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(config.num_hidden_layers)]
        for layer in self._cache:
            layer.normal_()
        indices = torch.randperm(int(starts[-1]), device=device).int()
        last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
        self._newest = indices[(starts[1:] - 1).long().to(device)].long(), (last - 1).long().to(device)
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(512 << 20, dtype=torch.uint8, device=device), "NHD", use_tensor_cores=True
        )
        self._wrapper.plan(
            starts.to(device),
            indices,
            last.to(device),
            config.num_attention_heads,
            groups,
            dim,
            PAGE,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        self._tokens = torch.zeros(len(lengths), dtype=torch.long, device=device)
        self._positions = torch.tensor(lengths, device=device) - 1
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        self._tokens.copy_(tokens)
        if self._graph is None:
            self._forward()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._forward()
        self._graph.replay()
        return self._logits.clone()

    def _forward(self) -> None:
        with attending(self._model, "indexcache_resident", self._attend, lambda *_, **__: None):
            self._logits: Tensor = self._model(
                self._tokens[:, None],
                position_ids=self._positions[:, None],
                past_key_values=PassedOn(len(self._cache)),
                use_cache=True,
            ).logits[:, -1]

    def _attend(self, call: AttentionCall) -> Tensor:
        cache = self._cache[call.layer]
        cache[:, self._newest[0], self._newest[1]] = torch.stack([call.key[:, :, 0], call.value[:, :, 0]])
        out: Tensor = self._wrapper.run(call.query[:, :, 0].contiguous(), (cache[0], cache[1]))
        return out[:, None]


def tokens_a_second(step: Callable[[Tensor], Tensor], requests: int, steps: int, device: torch.device) -> float:
    """Measure greedy replies."""
    tokens = torch.zeros(requests, dtype=torch.long, device=device)

    def reply() -> None:
        nonlocal tokens
        for _ in range(steps):
            tokens = step(tokens).argmax(-1)

    return requests * steps / timed(reply)[1]


def token_bytes(config: Any) -> int:
    """Return the bytes that a token takes in the cache of all layers, in bfloat16."""
    return int(4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim)


def numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def batches(options: argparse.Namespace, context: int, config: Any) -> list[int]:
    """Return the batches whose caches the host's memory would hold."""
    room = None if options.host_memory is None else options.host_memory * 2**30 // (token_bytes(config) * context)
    return [requests for requests in numbers(options.batches) if room is None or requests <= room]


def resident_batches(options: argparse.Namespace, context: int, config: Any, free: int) -> list[int]:
    """Return the batches of full attention: what `free` bytes hold, and what the buffers of each batch would hold."""
    found = [int(free // (token_bytes(config) * context))]
    if options.equal_memory:
        buffer = int(options.buffer * options.pages) * 64  # tokens
        equal = (-(-requests * buffer // context) for requests in batches(options, context, config))
        found += sorted({requests for requests in equal if requests < found[0]})
    return found


def full_attention(model: Any, options: argparse.Namespace, context: int) -> Iterator[dict[str, Any]]:
    """Measure as many requests as the device holds, then smaller batches."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] - SPARE
    for requests in resident_batches(options, context, model.config, free):
        resident = Resident(model, lengths_of(requests, context))
        tokens_a_second(resident.step, requests, WARM, model.device)
        speeds = [tokens_a_second(resident.step, requests, options.steps, model.device) for _ in range(2)]
        yield {"plan": "full attention", "context": context, "requests": requests, "tokens_s": speeds}
        del resident
        torch.cuda.empty_cache()


def offloaded(
    model: Any, options: argparse.Namespace, name: str, context: int, requests: int
) -> Iterator[dict[str, Any]]:
    """Measure one plan and batch at every rate of misses."""
    layers, device = model.config.num_hidden_layers, model.device
    pages = options.pages
    selection = Selection(
        page_tokens=64,
        pages=pages,
        recent_pages=8,
        sink_pages=1,
        score="compressed_keys",
        buffer_pages=int(options.buffer * pages),
    )
    roles = "F" * layers if name == "F" else "".join("S" if layer % 4 else "F" for layer in range(layers))
    room = max(lengths_of(requests, context)) + 2 * options.steps + 2 * WARM + 64
    decoder = Replaying(model, Pattern(roles, selection), requests, room, int(options.host_gb * 2**30))
    requested = (pages - 1) * requests * roles.count("F")
    for missing in (float(item) / 100 for item in options.misses.split(",")):
        decoder.begin(lengths_of(requests, context), missing, 2 * options.steps + WARM + 1)
        tokens_a_second(decoder.step, requests, WARM, device)
        before = sum(decoder.misses.values())
        speeds = [tokens_a_second(decoder.step, requests, options.steps, device) for _ in range(2)]
        brought = (sum(decoder.misses.values()) - before) / (2 * options.steps)  # a step, in layers that choose
        share, block = brought / requested, 4 * 64 * model.config.num_key_value_heads * model.config.head_dim
        moved = brought * block * layers / roles.count("F")
        yield {
            "plan": roles,
            "context": context,
            "requests": requests,
            "missing": share,
            "bytes_step": moved,
            "gb_s": moved * speeds[-1] / requests / 1e9,
            "tokens_s": speeds,
            "device_gb": torch.cuda.memory_allocated() / 1e9 if device.type == "cuda" else None,
        }


@torch.inference_mode()
def copies() -> Iterator[dict[str, Any]]:
    """Measure GB/s of `copy_blocks`, beside those of one large copy."""
    rows, room, blocks = 128, 96, 256
    yield {"one copy of 256 MiB, GB/s": copy_bandwidth(torch.device("cuda"))}
    for kilobytes in (4, 16, 64):
        host = torch.empty(rows, blocks, kilobytes << 10, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(rows, room, kilobytes << 10, dtype=torch.uint8, device="cuda")
        for missing in (1, 4, 16, 63):
            requested = torch.rand(rows, blocks, device="cuda").argsort(1)[:, :63].int()
            slots = torch.arange(63, dtype=torch.int32, device="cuda").repeat(rows, 1)
            needs_copy = torch.rand(rows, 63, device="cuda").argsort(1) < missing
            time_ms = graph_ms(partial(copy_blocks, host, device, requested, slots, needs_copy))
            speed = rows * missing * (kilobytes << 10) / time_ms / 1e6
            yield {"block_kb": kilobytes, "missing": missing, "rows": rows, "ms": time_ms, "gb_s": speed}


def runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results of all measurements."""
    if options.copies:
        yield from copies()
        return
    contexts = numbers(options.context)
    model = new_model(options.shape, 2 * max(contexts), options.device)
    if options.device == "cuda":
        yield {"device": torch.cuda.get_device_name(), "bandwidth_gb_s": copy_bandwidth(model.device)}
    for context in contexts:
        full: list[dict[str, Any]] = []
        if options.device == "cuda":
            for measured in full_attention(model, options, context):
                full.append(measured)
                yield measured
        for name in ("F", "FSSS") if options.shared else ("F",):
            for requests in batches(options, context, model.config):
                for found in offloaded(model, options, name, context, requests):
                    if full:
                        found["ratio"] = min(found["tokens_s"]) / max(full[0]["tokens_s"])
                    yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="minicpm4-8b", choices=SHAPES)
    parser.add_argument("--context", default="65536", help="tokens of a request, in the mean; several with commas")
    parser.add_argument("--batches", default="128,256", help="requests that are offloaded together")
    parser.add_argument("--misses", default="0,5,10,20", help="percent of the requested blocks")
    parser.add_argument("--pages", type=int, default=64, help="of 64 tokens, that a step selects")
    parser.add_argument("--buffer", type=float, default=1.5, help="blocks on the device, in selections")
    parser.add_argument("--shared", action="store_true", help="also a plan in which one layer in four chooses")
    parser.add_argument("--steps", type=int, default=256, help="timed, twice")
    parser.add_argument("--host-gb", type=float, default=32)
    parser.add_argument("--equal-memory", action="store_true", help="also full attention with the memory of buffers")
    parser.add_argument("--host-memory", type=int, help="GiB that the caches of a batch may take; any")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("bench_offload.json"))
    options = parser.parse_args()
    results = []
    for result in runs(options):
        print(json.dumps(result), flush=True)
        results.append(result)
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
