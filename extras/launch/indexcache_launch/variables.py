"""The environment variables of SGLang that change what indexers select or attention reads.

They are known by the words in their names, so that those of a next version are, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from sglang_indexcache.sglang.variables import PENDING

_WORDS = re.compile(
    r"(?:SGLANG|SGL)_(?!INDEXCACHE)(?:\w*_)?(?:DSA|NSA|INDEXER|INDEX|TOPK|LITETOPK|SPARSE|HISPARSE|FLASHMLA|MLA|MLAPO|MHA|ATTN"
    r"|ATTENTION|CP|DCP|TBO|KV|KVCACHE|DSV4|DSV41|C4|HCA|MQA|Q8KV8)(?:_\w*)?"
)
_ELSEWHERE = re.compile(  # what has such a word, and does something else
    r"SGLANG_(?:ENABLE_METRICS_DP_ATTENTION|KV_CANARY_\w+|OPT_USE_FUSED_HASH_TOPK|OPT_USE_JIT_KERNEL_GROUPED_TOPK"
    r"|OPT_USE_FUSED_GATE_TOPK|OPT_USE_GATE_TOPK_JIT|K3_RADIX4_TOPK|\w*REASONING_EFFORT|DISAGGREGATION_\w+"
    r"|TEST_\w+|MINIMAX_\w+|NVFP4_CKPT_FP8_GEMM_IN_ATTN)"
)
RAN = {
    "SGLANG_DSA_FUSE_TOPK": "SGLang 0.5.23 on CPUs; SGLang 0.5.17 on an H100",
    "SGLANG_DSA_TOPK_BROADCAST": "set by calibration servers",
}


def touching(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables that are set, are not refused and may change what is selected or attended to."""
    for name in sorted(variables):
        pending = any(names.fullmatch(name) for names, _ in PENDING)
        if not pending and variables[name] and _WORDS.fullmatch(name) and not _ELSEWHERE.fullmatch(name):
            yield name
