"""Kernels of the experiments, in the form of `indexcache_kernels`."""

from indexcache_lab.kernels.block_attention import block_attention
from indexcache_lab.kernels.block_scores import block_scores, compress_keys
from indexcache_lab.kernels.block_swap import BlockBuffer, copy_blocks, swap_blocks

__all__ = ["BlockBuffer", "block_attention", "block_scores", "compress_keys", "copy_blocks", "swap_blocks"]
