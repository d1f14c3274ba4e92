"""Attention of prompt queries that each selected for itself, by a kernel of an extension in place of SGLang's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.extensions import extensions
from sglang_indexcache.io.refusal import UNION_FLAG

NAME = "union"


@dataclass(frozen=True, kw_only=True)
class Served:
    """Attention of one rank, as it was loaded.

    Attributes:
        device: of the attention.
        dtype: of the KV cache.
        heads: heads of each layer on this rank.
        dim: dimensions of a key.
        v_dim: dimensions of a value, the first ones of its key.
        topk: keys of a selection.
        selecting: for each of these layers, the layer whose selection it attends to.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    dim: int
    v_dim: int
    topk: int
    selecting: Mapping[int, int]


class ExactAttention(ABC):
    """Attends in place of SGLang's sparse kernels, where it is faster, on one rank; they get what it leaves.

    Entry points of the group `indexcache.attention` are classes of it, which are made with a `Served` and raise
    `ProofError` where they can't attend to that.
    """

    @abstractmethod
    def __init__(self, served: Served) -> None: ...

    @property
    @abstractmethod
    def passes(self) -> Mapping[str, int]:
        """How often it attended and how often it left that to SGLang: a count for each selection of a prompt."""

    @abstractmethod
    def begin(self, layer: int, forward_batch: Any) -> None:
        """Begin a layer of a pass, whether or not a sparse kernel will be called in it."""

    @abstractmethod
    def attend(self, layer: int, forward_batch: Any, given: Mapping[str, Any]) -> Tensor | None:
        """Return what a sparse kernel would return for these arguments by name, or `None` to leave it to SGLang.

        Args:
            layer: one of `Served.selecting`, for which `begin` was called.
            forward_batch: SGLang's; what is kept for other layers of the pass is kept on it.
            given: among others q_all `[T, H, dim]`, kv_cache, page_table_1 `[T, K]` of its rows, sm_scale.
        """


def attention_of(served: Served) -> ExactAttention:
    """Return what attends on this rank.

    Raises:
        ProofError: if no extension offers it, or it does not run here.
    """
    kind = extensions("attention", ExactAttention).get(NAME)
    if kind is None:
        raise ProofError(f"no extension has attention over unions, expected indexcache_lab or no {UNION_FLAG}")
    found: ExactAttention = kind(served)
    return found
