"""The heads on a rank, and the tokens of a selection, that SGLang's DSA kernels take; others end a server's first pass.

Read: dsa_backend.py and overrides.py (`_dsa_split_backend_resolution`) of SGLang 0.5.11 to 0.5.23, and of 0.5.23 the
kernels tilelang_kernel.py, triton_sparse_mla.py and triton_sparse_mla_prefill.py; flashinfer 0.7.2 (`mla/_core.py`).
Of selections: dsa_topk_backend.py and transform_index.py of SGLang 0.5.17 and 0.5.23, top_k.py of sglang-kernel 0.4.10,
topk.py and topk.cuh of flashinfer 0.6.15 and 0.7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.sglang.meaning import Meaning, data_parallel_ranks

TILE = 64  # heads of FlashMLA's sparse kernel on Hopper, 128 on Blackwell: what does not fit 64 does not fit 128
_TAKES: Mapping[str, tuple[Callable[[int], bool], str]] = {
    "flashmla_sparse": (lambda heads: not TILE % heads or not heads % TILE, "divisors and multiples of 64"),
    "flashmla_sparse_q8": (lambda heads: not TILE % heads or not heads % TILE, "divisors and multiples of 64"),
    "tilelang": (lambda heads: heads <= TILE or not heads % TILE, "up to 64, or multiples of 64"),
    "triton_sparse_mla": (lambda heads: heads <= 32, "up to 32"),
    "triton": (lambda heads: heads <= 16 or not heads & (heads - 1), "up to 16, or powers of two"),
    "trtllm": (lambda heads: not 64 < heads < 128, "up to 64, or 128"),
}  # the others (flashmla_kv, fa3, ...) pad, or take any
_OTHERS = {
    "prefill": ("flashmla_kv", "tilelang", "triton_sparse_mla", "fa3"),
    "decode": ("flashmla_kv", "fa3", "tilelang"),
}
_DEFAULT = "flashmla_sparse"  # of prompts, unless the cache is in 8 bits
_SELECTS, _SELECTED = "sgl-kernel", 2048  # the default that selects, and how many tokens at most


@dataclass(frozen=True)
class HeadTrouble:
    """A reason why a model's heads, or the size of its selections, can't be served.

    Attributes:
        line: for people: what was found, and what is expected.
        certain: whether the arguments alone say so; otherwise it depends on the device.
    """

    line: str
    certain: bool


def troubles(heads: int, arguments: Any) -> Iterator[HeadTrouble]:
    """Yield why SGLang's server arguments, or a launch line, can't serve a model with so many heads."""
    arguments = Meaning(arguments)
    if (arguments.device or "cuda") != "cuda":
        return  # there are other kernels; on CPUs SGLang pads the heads of uneven ranks
    ranks = _attention_ranks(arguments)
    if heads % ranks:
        fits = ", ".join(str(ranks) for ranks in range(1, heads + 1) if not heads % ranks)
        yield HeadTrouble(f"{heads} heads can't be shared out among {ranks} ranks of attention; expected {fits}", True)
        return
    own = heads // ranks
    given = {step: getattr(arguments, f"dsa_{step}_backend") for step in _OTHERS}  # the kernels that are asked for
    for step, backend in given.items():
        if backend in _TAKES and not _TAKES[backend][0](own):
            yield HeadTrouble(_line(heads, own, step, backend, f"--dsa-{step}-backend {backend}"), True)
    eight_bits = str(getattr(arguments, "kv_cache_dtype", None) or "").startswith("fp8")
    if given["prefill"] is None and not eight_bits and not _TAKES[_DEFAULT][0](own):
        default = f"SGLang's default for prompts on Hopper, {_DEFAULT} unless the cache is fp8,"
        yield HeadTrouble(_line(heads, own, "prefill", _DEFAULT, default), False)


def selection_troubles(index_topk: int, arguments: Any) -> Iterator[HeadTrouble]:
    """Yield why SGLang's server arguments, or a launch line, can't serve a model with such selections."""
    arguments = Meaning(arguments)
    if index_topk <= _SELECTED or (arguments.device or "cuda") != "cuda":
        return
    backend = arguments.dsa_topk_backend or _SELECTS
    line = f"was never run with more than {_SELECTED} and a pattern; drafts have --speculative-dsa-topk-backend"
    if backend == _SELECTS:
        line = f"takes {_SELECTED} at most, and would end the server; expected flashinfer, and SGLang 0.5.23"
    yield HeadTrouble(f"index_topk is {index_topk}: --dsa-topk-backend {backend} {line}", backend == _SELECTS)


def _line(heads: int, own: int, step: str, backend: str, named: str) -> str:
    others = [name for name in _OTHERS[step] if name not in _TAKES or _TAKES[name][0](own)]
    ranks = [count for count in range(2, heads + 1) if not heads % count and _TAKES[backend][0](heads // count)]
    more = f", or {' or '.join(map(str, ranks[:4]))} ranks of attention (--tp)" if ranks else ""
    return (
        f"{own} heads on a rank, of {heads}: {named} takes {_TAKES[backend][1]} alone, and would end the server in its"
        f" first pass; expected --dsa-{step}-backend {', '.join(others[:-1])} or {others[-1]}{more}. Queries of blocks"
        " are attended from one by one with them"
    )


def _attention_ranks(arguments: Any) -> int:
    """Return over how many ranks the heads are shared out: tensor parallelism within data and context parallelism."""
    ranks = getattr(arguments, "tp_size", None) or 1
    if getattr(arguments, "enable_dp_attention", None):
        ranks //= data_parallel_ranks(arguments)
    return max(1, ranks // (getattr(arguments, "attn_cp_size", None) or 1))
