"""Attention of prompt queries that each selected for itself, by a kernel of an extension in place of SGLang's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.extensions import extensions
from sglang_indexcache.io.refusal import UNION_FLAG
from sglang_indexcache.pattern import Pattern

NAME = "union"


class ExactAttention(ABC):
    """Attends in place of SGLang's sparse kernels, where it is faster, on one rank; they get what it leaves.

    Entry points of the group `indexcache.attention` are classes of it.
    """

    @classmethod
    @abstractmethod
    def on(cls, backend: Any, pattern: Pattern, modules: Mapping[int, Any], dtype: torch.dtype) -> Self:
        """Make it for this rank's `modules`, by layer, on a `DeepseekSparseAttnBackend` with a KV cache of `dtype`.

        Raises:
            ProofError: if it can't attend there, or there is no layer for it.
        """

    @property
    @abstractmethod
    def layers(self) -> Collection[int]:
        """The layers that it attends in."""

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
            layer: one of `layers`, for which `begin` was called.
            forward_batch: SGLang's; what is kept for other layers of the pass is kept on it.
            given: among others q_all `[T, H, dim]`, kv_cache, page_table_1 `[T, K]` of its rows, sm_scale.
        """


def exact_attention() -> type[ExactAttention]:
    """Return what attends.

    Raises:
        ProofError: if no extension offers it.
    """
    kind: type[ExactAttention] | None = extensions("attention", ExactAttention).get(NAME)
    if kind is None:
        raise ProofError(f"no extension has attention over unions, expected indexcache_lab or no {UNION_FLAG}")
    return kind
