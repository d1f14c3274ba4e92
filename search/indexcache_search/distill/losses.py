"""Loss of distillation for each layer that an indexer serves (paper, Section 3.2).

p: the mean of the attention heads' distributions, `[..., queries, keys]`. log q: the logarithm of the indexer's
distribution over the same keys, -inf for keys that a query does not see.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) of each query, `[..., queries]`, in nats; keys with p = 0 add nothing."""
    return (torch.xlogy(p, p) - p * log_q.masked_fill(p == 0, 0.0)).sum(-1)
