"""AdamW over two kinds of weights: the weights that a method adds or retrains, and the body of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from indexcache_search.errors import NonFiniteLossError

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


def take_step(
    optimizer: torch.optim.Optimizer,
    name: str,
    measured: Mapping[str, float],
    own: str,
    max_norm: float,
    *,
    factor: float,
) -> dict[str, float]:
    """Clip the gradients of both kinds separately, take a step, and clear the gradients.

    Args:
        optimizer: made by `adamw`.
        name: name of the step for the error.
        measured: losses of the step, by their names.
        own: name of the first kind of weights.
        max_norm: limit of the norm of either kind's gradients.
        factor: factor of the peak rates.

    Returns:
        `norm_` and the name of each kind that trains, and `lr_factor`, for the step's record.

    Raises:
        NonFiniteLossError: if a loss or gradient is NaN or infinite; the step is not taken.
    """
    norms = {}
    first, *body = (group["params"] for group in optimizer.param_groups)
    for kind, parameters in ((own, first), ("body", [p for group in body for p in group])):
        if parameters:
            norm: Any = clip_grad_norm_(parameters, max_norm)
            norms[kind] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    if not all(map(math.isfinite, (*measured.values(), *norms.values()))):
        losses, gradients = (", ".join(f"{key} {value}" for key, value in found.items()) for found in (measured, norms))
        raise NonFiniteLossError(f"{name}: {losses}, gradient norms {gradients}; expected finite numbers")
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {**{f"norm_{kind}": norm for kind, norm in norms.items()}, "lr_factor": factor}
