"""The index of each layer as a module that can be counted: SGLang has two functions for all layers.

They are replaced while something counts, and put back at the first call after that. Which layer a call is of, the
backend's own methods say. Read: sglang/srt/layers/attention/minimax_sparse_backend.py and
minimax_sparse_ops/minimax_sparse.py of 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from torch import nn

from sglang_indexcache.sglang.attention import Observed

OPERATIONS = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
FUNCTIONS = ("flash_prefill_with_topk_index", "flash_decode_with_topk_idx")
_METHODS = ("forward_extend", "forward_decode")


class IndexBranch(nn.Module):
    """The weights of a layer's index, for those who ask whether they were loaded, and its calls while they count.

    Args:
        attention: SGLang's `MiniMaxM3Attention` with an index.
        index_topk: tokens that it chooses, or `None` if that is not known yet.
    """

    def __init__(self, attention: Any, index_topk: int | None = None) -> None:
        super().__init__()
        self.index_topk, self._calls = index_topk, list[IndexCalls]()
        for name in ("index_qkv_proj", "index_q_norm", "index_k_norm", "fused_qkv_index_proj"):
            part = getattr(attention, name, None)  # once weights are loaded, the last one has those of the first
            if part is not None:
                self.add_module(name, part)

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call SGLang's function, as it was called."""
        return function(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """See `nn.Module.register_forward_pre_hook`; calls come here from now on."""
        for calls in self._calls:
            calls.install()
        return super().register_forward_pre_hook(*args, **kwargs)

    @property
    def counted(self) -> bool:
        """True while somebody counts the calls."""
        return bool(self._forward_pre_hooks)


class IndexCalls:
    """The calls of all layers' indexes.

    Args:
        backend: SGLang's `MiniMaxSparseAttnBackend`.
        branches: an index by its layer.
    """

    def __init__(self, backend: Any, branches: dict[int, IndexBranch]) -> None:
        self._backend, self._branches = backend, branches
        self._layer = -1
        self._observed: list[Observed] = []
        self._replaced: dict[str, tuple[Any, Any]] = {}
        for branch in branches.values():
            branch._calls.append(self)

    def install(self) -> None:
        """Let the calls of SGLang's functions go through the indexes of their layers."""
        if self._observed:
            return
        operations = import_module(OPERATIONS)
        self._observed = [Observed(self._backend, method, self._note) for method in _METHODS]
        for name in FUNCTIONS:
            original = getattr(operations, name)
            self._replaced[name] = original, self._through(original)
            setattr(operations, name, self._replaced[name][1])

    def remove(self) -> None:
        """Put back what stood there."""
        operations = import_module(OPERATIONS)
        for item in self._observed:
            item.remove()
        for name, (original, ours) in self._replaced.items():
            if getattr(operations, name) is ours:
                setattr(operations, name, original)
        self._observed.clear()
        self._replaced.clear()

    def _note(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        self._layer = layer.layer_id

    def _through(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            branch = self._branches.get(self._layer)
            if not any(item.counted for item in self._branches.values()):
                self.remove()
            return original(*args, **kwargs) if branch is None else branch(original, *args, **kwargs)

        return call


def branches(backend: Any, attentions: Iterable[Any]) -> dict[int, IndexBranch]:
    """Return the index of each attention module, by its layer, whose calls can be counted."""
    tokens = backend.topk_blocks * backend.block_size_k
    found = {item.attn.layer_id: IndexBranch(item, tokens) for item in attentions}
    IndexCalls(backend, found)
    return found
