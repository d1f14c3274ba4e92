"""Run a transformers model with an attention function of the project's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

Attend = Callable[..., tuple[Tensor, Any]]
"""An attention of transformers for one layer: of query, key, value and mask it makes `[batch, queries, heads, dim]`."""


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of a layer's call of its attention function.

    Attributes:
        module: the layer's attention.
        query: `[batch, heads, queries, dim]`.
        key: `[batch, key heads, keys, dim]`, those of a cache included.
        value: likewise.
        mask: what the mask function of `attending` returned.
        scaling: factor of the products of queries and keys.
        options: further keyword arguments of transformers.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    options: Mapping[str, Any]

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return self.module.layer_idx  # type: ignore[return-value]  # torch does not type attributes

    def by(self, function: Callable[..., Any]) -> Attend:
        """Return `function`, one of transformers' attentions, for this layer."""
        return partial(function, self.module, scaling=self.scaling, **self.options)

    @property
    def eager(self) -> Attend:
        """The model's own eager attention for this layer."""
        return self.by(sys.modules[type(self.module).__module__].eager_attention_forward)


_running: dict[str, Callable[[AttentionCall], Tensor]] = {}


@contextmanager
def attending(
    model: Any, name: str, attention: Callable[[AttentionCall], Tensor], mask: Callable[..., Any]
) -> Iterator[None]:
    """Make all layers of `model` call `attention` inside the `with` block.

    Args:
        model: a transformers model.
        name: name to register the function under.
        attention: returns `[batch, queries, heads, dim]`.
        mask: builds the mask, see `AttentionMaskInterface`.

    Raises:
        RuntimeError: if a function of this name is already applied.
    """
    if name in _running:
        raise RuntimeError(f"{name} is already applied; leave the first `with` block before")
    before = model.config._attn_implementation
    AttentionInterface.register(name, partial(_run, name))
    AttentionMaskInterface.register(name, mask)
    _running[name] = attention
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        del _running[name]


def _run(  # noqa: PLR0917
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    return _running[name](AttentionCall(module, query, key, value, attention_mask, scaling, options)), None
