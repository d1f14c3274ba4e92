"""Kernels that score and select pages of the cache, in the form of `indexcache_kernels`."""

from indexcache_dense.kernels.compressed_keys import compressed_scores, update_means
from indexcache_dense.kernels.page_selection import StepMemory, page_scores, select_pages
from indexcache_dense.kernels.pages import CachedPages, PageBudget
from indexcache_dense.kernels.rounded_keys import RoundedKeys, round_keys, rounded_scores

__all__ = [
    "CachedPages",
    "PageBudget",
    "RoundedKeys",
    "StepMemory",
    "compressed_scores",
    "page_scores",
    "round_keys",
    "rounded_scores",
    "select_pages",
    "update_means",
]
