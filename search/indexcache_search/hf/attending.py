"""The one way to let a transformers model attend by a function of ours, and to undo it."""

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
    """All layers of `model` call `attention` inside the `with` block.

    Args:
        model: of transformers.
        name: what transformers calls the function.
        attention: see `AttentionInterface`.
        mask: makes the mask that it is given, see `AttentionMaskInterface`.
        running: where the function finds `state`, the only one in there.
        state: what it needs to know.

    Raises:
        RuntimeError: if there is one already.
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
