"""Activations that are computed again for the gradients instead of kept."""

from __future__ import annotations

from typing import Any


def checkpoint_gradients(model: Any) -> None:
    """Make layers of a transformers model keep only their inputs, and run again for the gradients."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
