"""Kernels of the indexers' loss and of gradients, in the form of `indexcache_kernels`."""

from indexcache_train.kernels.attention_gradients import sparse_attention
from indexcache_train.kernels.indexer_kl import indexer_kl
from indexcache_train.kernels.indexer_loss import (
    LayerAttention,
    gather_keys,
    indexer_loss,
    packed_ranges,
    padded_ranges,
)

__all__ = [
    "LayerAttention",
    "gather_keys",
    "indexer_kl",
    "indexer_loss",
    "packed_ranges",
    "padded_ranges",
    "sparse_attention",
]
