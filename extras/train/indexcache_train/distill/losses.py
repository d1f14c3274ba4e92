"""Definitions of the losses that train indexers, over whole rows of keys: what everything faster is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p || q) of each query, `[..., queries]`, in nats (paper, Section 3.2).

    Args:
        p: the mean of the attention heads' distributions, `[..., queries, keys]`; keys with p = 0 add nothing.
        log_q: the logarithm of the indexer's distribution over the same keys, -inf for keys that a query does not see.
    """
    return (torch.xlogy(p, p) - p * log_q.masked_fill(p == 0, 0.0)).sum(-1)


def multi_layer(targets: Sequence[Tensor], log_q: Tensor) -> Tensor:
    """Compute the mean divergence of the served layers' attention from one indexer, `[..., queries]` (Equation 1).

    Args:
        targets: of each layer that the indexer serves, as `p` of `divergence`.
        log_q: as of `divergence`.
    """
    return torch.stack([divergence(p, log_q) for p in targets]).mean(0)
