"""One model runner of SGLang that decodes batches in this process: times of a step, and log-probabilities.

`delta` starts it once for each condition, since SGLang leaves no process as it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from indexcache_dense.reuse import NO_MEMORY
from indexcache_dense.selection import selection_in
from scripts.bench.shapes import parse_cells
from scripts.bench.timing import host_ms, median_ms
from scripts.tools.inprocess import new_batch, new_request, start_runner
from sglang_indexcache import Pattern, PatternFile

CHECKED = (700, 300, 127, 128, 129, 5, 1)  # prompt lengths around the 128 tokens that `delta --check` selects
STEPS = 12


def name_of(pattern: Pattern) -> str:
    """Return a name for tables."""
    selection = selection_in(pattern)
    assert selection is not None
    own = pattern.roles.count("F")
    words = [
        f"{len(pattern.full_layers)} D",
        *([f"{own} F"] if own else []),
        *([str(selection.steps)] if selection.steps != NO_MEMORY else []),
    ]
    return " ".join(words)


def share_weights(layers: Any) -> None:
    """Give all layers the weights of the first, and free the others'."""
    import torch

    first = dict(layers[0].named_parameters())
    for layer in layers[1:]:
        for name, weight in layer.named_parameters():
            weight.data = first[name].data
    torch.cuda.empty_cache()


def load_runner(model: Path, arguments: dict[str, Any], one_layer: bool = False) -> Any:
    """Load SGLang's model runner with all plugins; with `one_layer` all layers have the weights of the first."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    if one_layer:
        load = ModelRunner.load_model

        def load_shared(runner: Any) -> None:
            load(runner)
            share_weights(runner.model.model.layers)

        ModelRunner.load_model = load_shared
    common = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "disable_radix_cache": True,
        "page_size": 16,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "mm_feature_transport": "cpu",
        "cuda_graph_backend_prefill": "disabled",
        "random_seed": 0,
    }
    return start_runner(model_path=str(model), **common, **arguments)


class Decoding:
    """A batch of requests that are decoded together.

    Args:
        runner: SGLang's.
        prompts: token ids.
        prefill: whether prompts are read; otherwise the cache is taken as it is.
    """

    def __init__(self, runner: Any, prompts: Sequence[Sequence[int]], prefill: bool) -> None:
        self._runner = runner
        requests = []
        for number, ids in enumerate(prompts):
            request = new_request(number, ids, 64)
            request.logprob_start_len = -1
            request.extend_end = len(ids)
            requests.append(request)
        self._batch = new_batch(runner, requests)
        if prefill:
            runner.forward(self._forward_batch())

    def _forward_batch(self) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        return ForwardBatch.init_new(self._batch, self._runner, return_hidden_states_before_norm=False)

    def step(self, tokens: Any) -> Any:
        """Append a token to each request; return the batch that decodes it."""
        self._batch.input_ids = tokens
        self._batch.prepare_for_decode()
        return self._forward_batch()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of a decode step in the fastest turn, by condition, cell and way of timing."""
    import torch

    from indexcache_dense.family import DENSE_GQA
    from indexcache_dense.family.backends import make_backend_class
    from indexcache_dense.family.sglang import DenseGqaSglang

    adapter = DENSE_GQA.sglang
    assert isinstance(adapter, DenseGqaSglang)
    cells = parse_cells(options.cells)
    arguments = {
        "load_format": "dummy",
        "max_total_tokens": max(batch * (context + 64) for batch, context in cells),
        "max_running_requests": max(batch for batch, _ in cells),
        "cuda_graph_bs_decode": sorted({batch for batch, _ in cells}),
        "context_length": max(context for _, context in cells) + 128,
        **json.loads(options.engine),
    }
    runner = load_runner(options.model, arguments, options.one_layer)
    pool, stock = runner.token_to_kv_pool, type(runner.attn_backend)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    patterns = [PatternFile.load(path).as_pattern() for path in options.patterns.split(",") if path]
    conditions: list[tuple[str, Pattern | None]] = [(f"stock {arguments['attention_backend']}", None)]
    conditions += [(f"{number}: {name_of(pattern)}", pattern) for number, pattern in enumerate(patterns, 1)]
    turns = [*conditions, *conditions[::-1]] if patterns else conditions
    found: dict[str, dict[str, dict[str, float]]] = {}
    with torch.no_grad():
        for number, (name, pattern) in enumerate(turns):
            if pattern is not None:
                runner.attn_backend.__class__ = make_backend_class(stock)
                runner.attn_backend.indexcache_selection = pattern.selection
                adapter.switch(runner, pattern)
                adapter.keep_pages(runner, pattern)
                read_all(runner)
            else:
                runner.attn_backend.__class__ = stock
            if number:
                runner.init_decode_cuda_graph()
            if pattern is not None:
                adapter.captured(runner, pattern)
            for batch, context in cells:
                best = found.setdefault(name, {}).setdefault(f"{batch}x{context}", {})
                for way, value in times(runner, batch, context, options.repeats).items():
                    best[way] = min(value, best.get(way, value))
    return {"times": found, "tokens": runner.max_total_num_tokens, "device": torch.cuda.get_device_name()}


def read_all(runner: Any) -> None:
    """Let selecting layers keep what they need of the whole cache, as if one request had read it."""
    import torch

    from indexcache_dense.kernels import CachedPages

    for layer, kept in runner.attn_backend.indexcache_pages.items():
        keys = runner.token_to_kv_pool.get_key_buffer(layer)
        slots = torch.arange(len(keys) // 16 * 16, dtype=torch.int32, device=keys.device)[None]
        lengths = torch.tensor([slots.shape[1]], dtype=torch.int32, device=keys.device)
        first = torch.zeros(1, dtype=torch.int64, device=keys.device)
        kept.read(keys, CachedPages(slots, lengths), first, "auto")


def times(runner: Any, batch: int, context: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a step of one cell, `alone` and `queued`."""
    import torch

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    step = Decoding(runner, [[7] * context] * batch, prefill=False).step(torch.full((batch,), 7, device="cuda"))

    def queued() -> None:
        for _ in range(10):
            runner.forward(step)

    return {
        "alone": median_ms(partial(runner.forward, step), repeats, warm=5, clock=host_ms),
        "queued": median_ms(queued, max(3, repeats // 5), warm=0, clock=host_ms) / 10,
    }


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Write the log-probabilities at each decoded position; the decoded tokens are the same for all conditions."""
    import torch

    arguments = {
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "cuda_graph_bs_decode": [1, 4, 8],
        "context_length": 2048,
        **json.loads(options.engine),
    }
    runner = load_runner(options.model, arguments)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 1024, (length,), generator=generator).tolist() for length in CHECKED]
    forced = torch.randint(2, 1024, (STEPS, len(CHECKED)), generator=generator)
    with torch.no_grad():
        decoding = Decoding(runner, prompts, prefill=True)
        rows = []
        for tokens in forced:
            output = runner.forward(decoding.step(tokens.cuda())).logits_output
            rows.append(output.next_token_logits.float().log_softmax(-1).cpu())
    torch.save(torch.stack(rows), options.logprobs)
    captured = vars(runner.attn_backend).get("indexcache_captured", {})
    return {
        "backend": type(runner.attn_backend).__name__,
        "captured": {size: "".join(letters[layer] for layer in sorted(letters)) for size, letters in captured.items()},
    }
