"""What distillation minimises for each layer that an indexer serves (paper, Section 3.2).

p: what an attention does, the mean of its heads' distributions, `[..., queries, keys]`. log q: the logarithm of what
the indexer says, over the same keys, -inf for those that a query does not see.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divergence(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each query, `[..., queries]`, in nats; keys with p = 0 add nothing."""
    return (torch.xlogy(p, p) - p * log_q.masked_fill(p == 0, 0.0)).sum(-1)
