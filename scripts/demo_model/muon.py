"""Muon for the demo model's matrices, batched over layers of equal shape."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of Jordan et al., "Muon", 2024


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Replace each matrix of `update` (`[..., rows, columns]`) by a nearly orthogonal one with the same row space."""
    a, b, c = _QUINTIC
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    nearly: Tensor = (x.mT if tall else x).float()
    return nearly


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al. 2024), scaled to AdamW's update size (Liu et al. 2025).

    torch.optim.Muon does the same a matrix at a time; here the same weight of all layers is one batched product, which
    is what keeps a 16-layer toy fast.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.1, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                gradient = torch.stack([p.grad for p in parameters if p.grad is not None]).float()
                state = self.state[parameters[0]]
                buffer = state.setdefault("momentum", torch.zeros_like(gradient))
                buffer.lerp_(gradient, 1 - group["momentum"])
                update = orthogonalize(gradient.lerp(buffer, group["momentum"]))
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = -group["lr"] * 0.2 * max(shape[-2:]) ** 0.5
                torch._foreach_add_(parameters, list((update * scale).unbind(0)))
