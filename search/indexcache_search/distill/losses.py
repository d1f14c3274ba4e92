"""The distillation losses of the paper's Section 3.2, on distributions over keys.

p: what an attention does, the mean of its heads' distributions, `[..., queries, keys]`. log q: the logarithm of what
the indexer says, over the same keys, -inf for those that a query does not see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each query, `[..., queries]`, in nats; keys with p = 0 add nothing."""
    return (torch.xlogy(p, p) - p * log_q.masked_fill(p == 0, 0.0)).sum(-1)


def multi_layer(targets: Sequence[Tensor], log_q: Tensor) -> Tensor:
    """Eq. 1: the mean divergence of the served layers' attention from one indexer."""
    return torch.stack([divergence(p, log_q) for p in targets]).mean(0)


def averaged(targets: Sequence[Tensor], log_q: Tensor) -> Tensor:
    """Eq. 2: the divergence of the served layers' mean attention. Same gradient as Eq. 1, less by a constant."""
    return divergence(torch.stack(list(targets)).mean(0), log_q)
