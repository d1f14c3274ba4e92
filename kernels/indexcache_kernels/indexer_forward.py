"""The signature by which transformers calls the indexer of a layer; its names change between versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from indexcache_kernels.errors import KernelInputError

CACHE_NAMES = ("cache", "past_key_values")  # of a key/value cache: from transformers 5.24 on, and before
_TAKES = ("hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids")


def check_indexer(indexer: type[nn.Module]) -> None:
    """Check that a class of indexers is called as `indexer_forward` expects.

    Raises:
        KernelInputError: with the parameters that it takes, and those expected.
    """
    takes = tuple(inspect.signature(indexer.forward).parameters)[1:]
    if takes[:-1] != _TAKES or takes[-1] not in CACHE_NAMES:
        raise KernelInputError(
            f"{indexer.__name__} of transformers takes {', '.join(takes)}; "
            f"expected {', '.join(_TAKES)}, and {' or '.join(CACHE_NAMES)}"
        )


def indexer_forward(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the `forward` of an indexer, which takes a cache by any of its names; other arguments are a TypeError.

    Args:
        compute: gets hidden states `[batch, queries, hidden]`, query residual `[batch, queries, q_lora_rank]`, cosine
            and sine, a mask `[batch, queries, ...]`, position ids, and the key/value cache or None; gives the
            selection `[batch, queries, k]`.
    """

    @torch.no_grad()
    def forward(
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
    ) -> Tensor:
        held = past_key_values if cache is None else cache
        return compute(hidden_states, q_resid, position_embeddings, attention_mask, position_ids, held)

    return forward
