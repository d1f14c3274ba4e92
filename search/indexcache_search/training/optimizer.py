"""AdamW over two kinds of weights: the weights that a method adds or retrains, and the body of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

BETAS = (0.9, 0.95)


def adamw(
    own: Sequence[nn.Parameter], body: Sequence[nn.Parameter], *, own_lr: float, lr: float, weight_decay: float
) -> torch.optim.AdamW:
    """Make an optimizer with peak rates. Only the body's matrices decay; `own` come first, and are never empty."""
    groups: list[dict[str, Any]] = [
        {"params": list(own), "peak": own_lr, "weight_decay": 0.0},
        {"params": [p for p in body if p.ndim > 1], "peak": lr, "weight_decay": weight_decay},
        {"params": [p for p in body if p.ndim < 2], "peak": lr, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([{**group, "lr": group["peak"]} for group in groups if group["params"]], betas=BETAS)


def clip(optimizer: torch.optim.Optimizer, own: str, max_norm: float) -> dict[str, float]:
    """Clip the gradients of both kinds separately, and return their norms; `own` is the name of the first kind."""
    norms = {}
    first, *body = (group["params"] for group in optimizer.param_groups)
    for name, parameters in ((own, first), ("body", [p for group in body for p in group])):
        if parameters:
            norm: Any = clip_grad_norm_(parameters, max_norm)
            norms[name] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return norms


def take_step(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Take a step with peak rates times `factor`, and clear the gradients."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
