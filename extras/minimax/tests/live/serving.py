"""Real SGLang on a random MiniMax-M3, in forks that have its stand-ins for kernels."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from extras.minimax.tests.live import kernels
from extras.minimax.tests.models import VOCAB
from scripts.tools import inprocess
from scripts.tools.inprocess import Served, call
from tests.live import ending

STEPS = 4
ARGUMENTS = {"attention_backend": "torch_native", "page_size": 4}
RUNNER = "sglang.srt.model_executor.model_runner"
BACKEND = "sglang.srt.layers.attention.minimax_sparse_backend"


def prompts(seed: int = 0, lengths: Sequence[int] = (60, 30)) -> list[list[int]]:
    """Random prompts, longer than what a query chooses."""
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]


def environment(pattern: str | None, **arguments: Any) -> dict[str, str]:
    """Variables of a fork that serves `pattern`, or SGLang alone."""
    own = {} if pattern is None else {"SGLANG_INDEXCACHE_PATTERN": pattern}
    return {
        "SGLANG_OPT_USE_BF16_ROUTER_GEMM": "0",  # a product of bfloat16 with a float32 result, which CPUs don't have
        "TEST_ARGUMENTS": json.dumps({**ARGUMENTS, **arguments}),
        **own,
    }


def generate(model: Path, pattern: str | None, record: Path, **arguments: Any) -> list[Served]:
    """See `scripts.tools.inprocess.generate`."""
    answer: list[Served] = call(_generate, model, str(record), **environment(pattern, **arguments))
    return answer


def _generate(model: Path, record: str) -> list[Served]:
    kernels.install(record)
    return inprocess._generate(model, prompts(), STEPS)


def ended(model: Path, pattern: str, change: Callable[[], None]) -> tuple[int, list[str]]:
    """Exit code and lines of ours of a fork that loads the model and generates after a `change` of SGLang."""
    answer: tuple[int, list[str]] = call(_ended, model, change, **environment(pattern))
    return answer


def _ended(model: Path, change: Callable[[], None]) -> tuple[int, list[str]]:
    kernels.install()
    change()
    return ending._ended(lambda: inprocess._generate(model, prompts(), STEPS))


# -- changes: what a next SGLang, or somebody else's plugin, may do


def _around(module: str, owner: str, method: str, then: Callable[[Any, Callable[[], Any]], Any]) -> None:
    kind = getattr(importlib.import_module(module), owner)
    original = getattr(kind, method)
    setattr(kind, method, lambda self, *args, **kwargs: then(self, lambda: original(self, *args, **kwargs)))


def rewritten_before_graphs() -> None:
    """Somebody switches sharing off before graphs are captured."""

    def then(runner: Any, run: Callable[[], Any]) -> Any:
        runner.attn_backend.sparse.index_cache_enabled = False
        return run()

    _around(RUNNER, "ModelRunner", "init_cuda_graphs", then)


def filled_by_a_frequency() -> None:
    """A next SGLang fills the tables anew at the first pass, as its `__init__` does."""

    def then(backend: Any, run: Callable[[], Any]) -> Any:
        layers = backend.sparse_layer_ids
        backend._topk_is_source = {layer: site % 2 == 0 for site, layer in enumerate(layers)}
        backend._topk_group_of_layer = {layer: site // 2 for site, layer in enumerate(layers)}
        return run()

    _around(BACKEND, "MiniMaxSparseAttnBackend", "init_forward_metadata_out_graph", then)


def deaf_in_prompts() -> None:
    """The backend does not look at what was written while it reads prompts."""

    def then(backend: Any, run: Callable[[], Any]) -> Any:
        backend.index_cache_enabled = False
        try:
            return run()
        finally:
            backend.index_cache_enabled = True

    _around(BACKEND, "MiniMaxSparseAttnBackend", "forward_extend", then)


def another_backend() -> None:
    """A next SGLang has another backend under another name."""
    module: Any = importlib.import_module(BACKEND)
    module.MiniMaxSparseAttnBackend = type("MiniMaxSparseBackendV2", (module.MiniMaxSparseAttnBackend,), {})


def an_index_is_not_loaded() -> None:
    """The loader leaves one index out, without a word."""

    def then(model: Any, run: Callable[[], Any]) -> Any:
        loaded = run()
        if "model.layers.4.self_attn.index_qkv_proj.weight" in dict(model.named_parameters()):
            model.model.layers[4].self_attn.index_qkv_proj.weight.data.fill_(float("nan"))
        return loaded

    _around("sglang.srt.models.minimax_m3", "MiniMaxM3SparseForCausalLM", "load_weights", then)


# -- one server that is switched, as for a search


def switched(model: Path, patterns: Sequence[str]) -> list[tuple[str, list[float]]]:
    """For each pattern: what the tables say once it was switched to, and the logprobs of a prompt."""
    answer: list[tuple[str, list[float]]] = call(_switched, model, list(patterns), **environment(None))
    return answer


def _switched(model: Path, patterns: list[str]) -> list[tuple[str, list[float]]]:
    import torch

    from indexcache_minimax.family import MINIMAX_M3
    from sglang_indexcache import Pattern

    kernels.install()
    runner = inprocess.load_runner(model)
    forward_batch = sys.modules["sglang.srt.model_executor.forward_batch_info"].ForwardBatch
    adapter, found = MINIMAX_M3.sglang, []
    adapter.loaded(runner, Pattern.full(len(patterns[0])))
    for number, pattern in enumerate(patterns):
        adapter.switch(runner, Pattern(pattern))
        [ids] = prompts(lengths=(60,))
        request = inprocess.new_request(number, ids, 1, return_logprob=True)
        request.logprob_start_len, request.extend_end = 0, len(ids)
        with torch.no_grad():
            batch = inprocess.new_batch(runner, [request])
            output = runner.forward(forward_batch.init_new(batch, runner, return_hidden_states_before_norm=False))
        found.append((adapter.configured(runner), output.logits_output.input_token_logprobs.tolist()[: len(ids) - 1]))
    return found
