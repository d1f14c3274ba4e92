"""Memory-lean kernels for DeepSeek Sparse Attention, in Triton.

Every operation is a folder: `naive.py` is its definition in PyTorch, `triton.py` the kernel, `README.md` the maths.
`transformers.use_kernels` runs DSA models of transformers on them.
"""

from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.indexer_kl import indexer_kl
from indexcache_kernels.indexer_topk import causal_ranges, indexer_topk
from indexcache_kernels.sparse_attention import sparse_attention

__all__ = ["KernelInputError", "causal_ranges", "indexer_kl", "indexer_topk", "sparse_attention"]
