"""Memory-lean kernels for attention that chooses what it attends to, in Triton; for CPUs one in C++.

Every operation is a folder: `naive.py` is its definition in PyTorch, `triton.py` the kernel, `README.md` the maths.
`transformers.use_kernels` runs DSA models of transformers on them.

Axes have one letter everywhere:

| letter | counts | letter | counts |
|---|---|---|---|
| T | queries | D | dimensions of a head's query and key |
| L | keys | V | dimensions of a value |
| K | selected keys of a query | I | heads of an indexer |
| H | heads | C | dimensions of an indexer's query and key |
| G | key heads; H / G heads share one | B | requests of a decode step |
| N | pages or blocks of a request | M | entries of its page table |

In kernels pointers end in `_ptr`, blocks of the axes are BLOCK_Q, BLOCK_K, BLOCK_H and BLOCK_I, and a comment behind a
tensor is its shape.
"""

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.indexer_topk import causal_ranges, indexer_topk
from indexcache_kernels.sparse_attention import sparse_attention

__all__ = ["KernelInputError", "causal_ranges", "indexer_topk", "sparse_attention"]
