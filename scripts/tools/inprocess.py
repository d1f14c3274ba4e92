"""Real SGLang's model runner in one process, without scheduler and tokenizer: seconds a case instead of half a minute.

A fork server imports SGLang once; every case is a fork of it with its own distributed state.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 600
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "dsa",
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "tilelang",
    "dsa_topk_backend": "torch",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "mem_fraction_static": 0.3,
    "random_seed": 0,
}


@dataclass(frozen=True)
class Served:
    """One sequence with SGLang's log-probabilities.

    Attributes:
        ids: prompt and generated tokens.
        prompt: length of the prompt.
        logprobs: of tokens 1, 2, ... of `ids`.
    """

    ids: tuple[int, ...]
    prompt: int
    logprobs: tuple[float, ...]


def call(function: Callable[..., Any], *args: Any, **environment: str) -> Any:
    """Call `function(*args)` in a fork of its own, with SGLang imported and these environment variables.

    Raises:
        RuntimeError: with the traceback from there.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.tools.preload"])
    parent, child = context.Pipe()
    process = context.Process(target=_child, args=(child, {**ENVIRONMENT, **environment}, function, args))
    process.start()
    child.close()
    try:
        if not parent.poll(TIMEOUT):
            raise TimeoutError(f"{function.__name__} gave no answer")
        failed, answer = parent.recv()
    except EOFError:
        process.join(TIMEOUT)
        raise RuntimeError(f"{function.__name__} ended with exit code {process.exitcode}") from None
    finally:
        process.join(60)
        process.kill()
    if failed:
        raise RuntimeError(answer)
    return answer


def new_thread_pool() -> None:
    """Make PyTorch's pool of threads anew, which a fork lost: the first two threads to need it would race for that."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _child(pipe: Connection, environment: dict[str, str], function: Callable[..., Any], args: Any) -> None:
    os.environ.update(environment)
    new_thread_pool()
    try:
        answer: Any = (False, function(*args))
    except Exception:
        answer = (True, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # no SGLang clean-up hooks


def own_arguments(model: Path) -> dict[str, Any]:
    """Return the arguments that a model needs: attention sinks (HY-V4) run on one kernel of SGLang alone."""
    config = json.loads((model / "config.json").read_text())
    if "index_topk" not in config:
        return {"attention_backend": "torch_native"}
    if config["model_type"] == "deepseek_v4":
        return {"attention_backend": "dsv4", "swa_full_tokens_ratio": 1.0, "disable_shared_experts_fusion": True}
    if "learnable_sink_init" not in config:
        return {}
    return dict.fromkeys(("dsa_prefill_backend", "dsa_decode_backend"), "flashmla_sparse")


def load_runner(model: Path) -> Any:
    """Load SGLang's model runner for `model` with all plugins; only once in a process."""
    given = {**ARGUMENTS, **own_arguments(model), **json.loads(os.environ.get("TEST_ARGUMENTS", "{}"))}
    return start_runner(model_path=str(model), skip_tokenizer_init=True, **given)


def start_runner(**given: Any) -> Any:
    """Load SGLang's model runner with all plugins, for these arguments of a server; only once in a process."""
    from sglang.benchmark import one_batch
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    arguments = ServerArgs(**given)
    arguments.resolve_once()
    one_batch._set_envs_and_config(arguments)
    rank = one_batch.SpawnRanks(world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0)
    one_batch.publish(arguments, role="scheduler", ranks=rank)
    one_batch._init_process_global_configs()
    one_batch.get_tokenizer = lambda *_, **__: None
    wrapper, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    return wrapper.torch_runner


def new_request(number: int, ids: Sequence[int], steps: int, **more: Any) -> Any:
    """Make a greedy request for `steps` tokens behind a prompt; `more` goes to SGLang's `Req`."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array("q", ids),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=steps),
        **more,
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    return request


def new_batch(runner: Any, requests: Sequence[Any]) -> Any:
    """Make a batch of requests whose prompts are about to be read, without a prefix cache."""
    from sglang.benchmark.one_batch import TreeCacheNamespace
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    tree = TreeCacheNamespace(
        page_size=runner.page_size,
        device=runner.device,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
    )
    batch = ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=tree,
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    return batch


def generate(
    model: Path, pattern: str | None, prompts: Sequence[Sequence[int]], steps: int, record: Path, **arguments: Any
) -> list[Served]:
    """Load `model` with the plugin and `pattern`, prefill all prompts as one batch, decode greedily.

    Without a pattern it is SGLang alone. `arguments` are its own.

    Returns:
        A `Served` for each prompt, in the order given.
    """
    environment = {"DSA_CPU_RECORD": str(record), "TEST_ARGUMENTS": json.dumps(arguments)}
    if pattern is not None:
        environment["SGLANG_INDEXCACHE_PATTERN"] = pattern
    answer: list[Served] = call(_generate, model, prompts, steps, **environment)
    return answer


def _generate(model: Path, prompts: Sequence[Sequence[int]], steps: int) -> list[Served]:
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    runner = load_runner(model)
    requests = []
    for index, prompt in enumerate(prompts):
        request = new_request(index, prompt, steps, return_logprob=True)
        request.logprob_start_len = 0
        request.extend_end = len(prompt)
        requests.append(request)
    with torch.no_grad():
        batch = new_batch(runner, requests)
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        output = runner.forward(forward_batch).logits_output
        flat = output.input_token_logprobs.tolist()
        ids, logprobs, start = [list(prompt) for prompt in prompts], [], 0
        for prompt in prompts:  # each prompt has a last row of its own, for the token to come
            logprobs.append(flat[start : start + len(prompt) - 1])
            start += len(prompt)
        for step in range(steps):
            distribution = output.next_token_logits.float().log_softmax(dim=-1)
            chosen = distribution.argmax(dim=-1)
            for row, token in enumerate(chosen.tolist()):
                ids[row].append(token)
                logprobs[row].append(distribution[row, token].item())
            if step + 1 < steps:
                batch.input_ids = chosen
                batch.prepare_for_decode()
                forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
                output = runner.forward(forward_batch).logits_output
    return [
        Served(tuple(row), len(prompt), tuple(values))
        for row, prompt, values in zip(ids, prompts, logprobs, strict=True)
    ]
