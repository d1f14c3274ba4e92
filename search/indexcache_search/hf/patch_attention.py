"""Run a transformers model with an attention function of the project's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

State = TypeVar("State")


@contextmanager
def attending(
    model: Any, name: str, attention: Callable[..., Any], mask: Callable[..., Any], running: list[State], state: State
) -> Iterator[None]:
    """Make all layers of `model` call `attention` inside the `with` block.

    Args:
        model: a transformers model.
        name: name to register the function under.
        attention: the function, see `AttentionInterface`.
        mask: builds its mask, see `AttentionMaskInterface`.
        running: list in which the function finds `state`, its only item.
        state: data that the function needs.

    Raises:
        RuntimeError: if `running` already holds a state.
    """
    if running:
        raise RuntimeError(f"{name} is already applied; leave the first `with` block before")
    before = model.config._attn_implementation
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    running.append(state)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        running.clear()
