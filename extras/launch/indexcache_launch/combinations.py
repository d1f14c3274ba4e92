"""List for each feature of SGLang whether a pattern ran with it, is refused with it, or never ran with it.

`judge` reads launch lines by it, and docs/reference/compatibility.md has all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from indexcache_launch.launch_line import LaunchLine
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.combination import Combination
from sglang_indexcache.sglang.meaning import BREAKABLE, DISABLED, INTERLEAVE, TC_PIECEWISE, Meaning, is_off

_CPU = "SGLang 0.5.23 on CPUs"
_GPU = "SGLang 0.5.17 on an H100"
_NOW = "0.5.23 on an H200"
_BOTH, _BOTH_ON_TWO = f"{_CPU}; {_GPU}", f"{_CPU}; SGLang 0.5.17 on two H100"
_ON_NVIDIA = ("cuda", None)
PLAIN: dict[str, tuple[Any, ...]] = {  # values of flags with which everything was run
    "dtype": ("auto", "bfloat16", "float32"),
    "device": ("cuda", "cpu"),
    "load_format": ("auto", "safetensors", "dummy"),
    "model_impl": ("auto", "sglang"),
    "kv_cache_dtype": ("auto", "bf16", "bfloat16"),
    "dsa_topk_backend": ("sgl-kernel", "torch"),
    "cuda_graph_backend_decode": ("full", DISABLED),
    "cuda_graph_backend_prefill": (DISABLED,),
    "cuda_graph_tc_compiler": ("eager",),
    "piecewise_cuda_graph_compiler": ("eager",),
    "page_size": (64,),  # SGLang sets it itself where indexers choose
    "disaggregation_transfer_backend": ("mooncake", "mooncake_tcp"),
}


def _one_of(name: str, *values: str) -> Callable[[Any], bool]:
    return lambda arguments: getattr(arguments, name, None) in values


def drafts_of(arguments: Any) -> str:
    """Return the algorithm that drafts tokens; empty without one."""
    return str(getattr(arguments, "speculative_algorithm", None) or "").upper()


def _chains(arguments: Any) -> bool:
    return drafts_of(arguments) in ("EAGLE", "NEXTN") and (getattr(arguments, "speculative_eagle_topk", None) or 1) == 1


def _interleaved(arguments: Any) -> bool:
    return bool(arguments.enable_prefill_cp) and arguments.cp_strategy == INTERLEAVE


def _since(version: str, first: tuple[int, int, int]) -> bool:
    """Return whether a version is that of `first` or newer; a version that says nothing is."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return len(numbers) < 3 or numbers >= first


def _graphs_by_default(line: LaunchLine, family: Family) -> str:
    """Return where SGLang captures prompts unasked: breakable graphs, since 0.5.17 where indexers choose, too."""
    meant, first = Meaning(line), family.sglang.prompt_graphs_since
    off = meant.cuda_graph_backend_prefill or meant.disaggregation_mode == "decode" or meant.device not in _ON_NVIDIA
    if off or first is None or not _since(line.version, first):
        return ""
    return "on by default on NVIDIA GPUs, as --cuda-graph-backend-prefill breakable"


def _blackwell_by_default(line: LaunchLine, family: Family) -> str:
    asked = line.kv_cache_dtype not in (None, "auto") or line.device not in _ON_NVIDIA
    by_default = family.sglang.fp8_on_blackwell and not asked
    return "on by default there, and nothing was run there" if by_default else ""


COMBINATIONS = (  # of all families; some have more, see `SglangAdapter.combinations`
    Combination("tensor parallelism", ("--tp-size",), f"{_BOTH_ON_TWO}, 0.5.23 on two H200", ("tp_size",)),
    Combination("pipeline parallelism", ("--pp-size",), _CPU, ("pp_size",)),
    Combination(
        "data-parallel attention",
        ("--enable-dp-attention", "--attn-dp-size"),
        _BOTH_ON_TWO,
        ("enable_dp_attention", "dp_size"),
        lambda arguments: bool(arguments.enable_dp_attention),
    ),
    Combination("data-parallel LM head", ("--enable-dp-lm-head",), _BOTH_ON_TWO, ("enable_dp_lm_head",)),
    Combination(
        "expert parallelism",
        ("--ep-size",),
        _BOTH_ON_TWO,
        ("ep_size",),
        without="DeepEP and other --moe-a2a-backend",
    ),
    Combination(
        "all-to-all of experts",
        ("--moe-a2a-backend",),
        "",
        ("moe_a2a_backend",),
        lambda arguments: not is_off(arguments.moe_a2a_backend),
    ),
    Combination(
        "MTP/NextN, EAGLE",
        ("--speculative-algorithm EAGLE",),
        f"{_BOTH}, {_NOW}",
        ("speculative_algorithm", "speculative_eagle_topk"),
        _chains,
    ),
    Combination(
        "other drafts",
        ("--speculative-algorithm", "--speculative-eagle-topk"),
        "",
        ("speculative_algorithm", "speculative_eagle_topk"),
        lambda arguments: bool(drafts_of(arguments)) and not _chains(arguments),
    ),
    Combination(
        "context-parallel prefill",
        ("--enable-prefill-cp", "--cp-strategy interleave"),
        f"{_CPU} and, also with blocks of queries, on two H200; SGLang 0.5.17 on two H100",
        ("enable_prefill_cp", "cp_strategy", "attn_cp_size"),
        _interleaved,
    ),
    Combination(
        "other context parallelism",
        ("--cp-strategy zigzag", "--attn-cp-size"),
        "",
        ("enable_prefill_cp", "cp_strategy", "attn_cp_size"),
        lambda given: (given.enable_prefill_cp or (given.attn_cp_size or 1) > 1) and not _interleaved(given),
        without="SGLang 0.5.23 serves no DSA model with zigzag",
    ),
    Combination(
        "heads shared out in decoding, beside context-parallel prefill",
        ("--enable-cp-decode-attn-tp",),
        _CPU,
        ("enable_cp_decode_attn_tp",),
        without="on GPUs",
    ),
    Combination(
        "decode context parallelism",
        ("--dcp-size",),
        _CPU + ", FlashInfer's TRT-LLM attention replaced",
        ("dcp_size",),
        without="on GPUs (that kernel needs Blackwell), MTP/NextN with it",
    ),
    Combination(
        "prefill and decode apart",
        ("--disaggregation-mode",),
        _CPU + ", by Mooncake over TCP; servers with other patterns refuse each other's handshake",
        ("disaggregation_mode",),
        _one_of("disaggregation_mode", "prefill", "decode"),
        "other transfers",
    ),
    Combination(
        "mixed chunks",
        ("--enable-mixed-chunk",),
        f"{_CPU} and on an H200, requests without logprobs (with them SGLang mixes nothing)",
        ("enable_mixed_chunk",),
    ),
    Combination(
        "HiCache",
        ("--enable-hierarchical-cache", "--enable-hicache"),
        f"{_GPU}, {_NOW}",
        ("enable_hierarchical_cache",),
        without="its storage",
    ),
    Combination(
        "storage of HiCache",
        ("--hicache-storage-backend",),
        "",
        ("hicache_storage_backend",),
        without="refused where SGLang's source says that keys don't have the model's name, which carries the pattern",
    ),
    Combination("HiSparse", ("--enable-hisparse",), f"{_GPU}, {_NOW}", ("enable_hisparse",)),
    Combination(
        "LoRA",
        ("--enable-lora", "--lora-paths"),
        "",
        ("enable_lora", "lora_paths"),
        without="SGLang 0.5.17 fails to import it for DSA; 0.5.23 needs a GPU for it",
    ),
    Combination(
        "fp8 KV cache",
        ("--kv-cache-dtype fp8_e4m3",),
        f"{_GPU}, {_NOW}",
        ("kv_cache_dtype",),
        _one_of("kv_cache_dtype", "fp8_e4m3"),
    ),
    Combination(
        "other types of KV cache",
        ("--kv-cache-dtype fp8_e5m2, fp4_e2m1, ...",),
        "",
        ("kv_cache_dtype",),
        lambda arguments: (arguments.kv_cache_dtype or "auto") not in ("fp8_e4m3", *PLAIN["kv_cache_dtype"]),
    ),
    Combination(
        "fp8 KV cache and TRT-LLM kernels on Blackwell GPUs",
        ("--kv-cache-dtype auto",),
        "",
        ("kv_cache_dtype",),
        lambda arguments: False,
        default=_blackwell_by_default,
    ),
    *(
        Combination(
            f"kernels of sparse attention in {where}",
            (f"--dsa-{word}-backend {', '.join(ran)}",),
            f"{_GPU}; fa3: SGLang {_NOW}",
            (f"dsa_{word}_backend",),
            _one_of(f"dsa_{word}_backend", *ran),
            "other kernels",
        )
        for word, where, ran in (
            ("prefill", "prompts", ("flashmla_sparse", "flashmla_sparse_q8", "flashmla_kv", "flashmla_auto", "fa3")),
            ("decode", "decoding", ("flashmla_sparse", "flashmla_kv", "fa3")),
        )
    ),
    Combination(
        "backend of sparse attention",
        ("--attention-backend dsa",),
        _BOTH,
        ("attention_backend",),
        _one_of("attention_backend", "dsa", "nsa"),
    ),
    Combination(
        "torch.compile",
        ("--enable-torch-compile",),
        "",
        ("enable_torch_compile",),
        without="SGLang 0.5.17's indexer can't be compiled",
    ),
    Combination(
        "graphs of prompts",
        ("--cuda-graph-backend-prefill breakable, tc_piecewise",),
        f"{_GPU}; breakable: SGLang {_NOW}",
        ("cuda_graph_backend_prefill",),
        _one_of("cuda_graph_backend_prefill", BREAKABLE, TC_PIECEWISE),
        "counting in what torch.compile traces (tc_piecewise)",
        default=_graphs_by_default,
    ),
    Combination(
        "deterministic inference",
        ("--enable-deterministic-inference",),
        "",
        ("enable_deterministic_inference",),
        without="SGLang 0.5.17 and 0.5.23 refuse it with their DSA backend",
    ),
    Combination("several nodes", ("--nnodes",), _CPU, ("nnodes",), without="nodes on machines of their own"),
    Combination(
        "replicas",
        ("--dp-size",),
        _CPU,
        ("dp_size",),
        lambda arguments: (arguments.dp_size or 1) > 1 and not arguments.enable_dp_attention,
    ),
)
