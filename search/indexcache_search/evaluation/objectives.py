"""Objectives of a search: a number for each scored token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Objective = Literal["nll", "kl"]
"""`nll`: the paper's loss on the text. `kl`: the divergence from the model with its own pattern."""


def nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy, `[tokens]`, in nats.

    Args:
        logits: `[tokens, vocabulary]`, float32.
        labels: `[tokens]`, int64, the actual next tokens.
    """
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits, labels, reduction="none")


def kl(logits: Tensor, baseline: Tensor) -> Tensor:
    """Return KL(baseline || pattern) over the whole vocabulary, `[tokens]`, in nats.

    Args:
        logits: `[tokens, vocabulary]`, float32, under the pattern.
        baseline: the same under the model's own pattern.
    """
    truth = baseline.log_softmax(-1)
    return (truth.exp() * (truth - logits.log_softmax(-1))).sum(-1)
