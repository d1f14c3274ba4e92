"""Features of SGLang that concern dense models alone, see `sglang_indexcache.serving.combinations`."""

from __future__ import annotations

from indexcache_dense.family import DENSE_GQA
from sglang_indexcache.serving.combinations import Combination

COMBINATIONS = (
    Combination(
        "backend of dense attention",
        ("--attention-backend flashinfer, torch_native",),
        "flashinfer: SGLang 0.5.17 on an H100; torch_native: SGLang 0.5.23 on CPUs",
        ("attention_backend",),
        lambda arguments: arguments.attention_backend in ("flashinfer", "torch_native"),
        family=DENSE_GQA,
    ),
    Combination(
        "pages of 16 tokens",
        ("--page-size 16",),
        "SGLang 0.5.23 on CPUs; SGLang 0.5.17 on an H100",
        ("page_size",),
        lambda arguments: arguments.page_size == 16,
        family=DENSE_GQA,
    ),
)
