"""SGLang's attention backends that can decode over selected pages, by their classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.refusal import UNREAD_FLAG
from sglang_indexcache.sglang.probes import Feature, Need, SglangSource

_REPLACED = ("forward_decode", "forward_extend", "init_forward_metadata", "init_forward_metadata_out_graph")
_STOCK = "indexcache_stock"  # on a subclass: the class that it was made of


@dataclass(frozen=True)
class Backend:
    """An attention backend that can decode over selected pages.

    Attributes:
        name: as in `--attention-backend`.
        module: dotted name below `sglang.`
        stock: SGLang's class.
        home: module beside this one whose `make_backend_class` makes the subclass; imported when it is needed.
        methods: what its class must have: methods, their parameters, and what they mention.
    """

    name: str
    module: str
    stock: str
    home: str
    methods: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]

    @property
    def feature(self) -> Feature:
        """Feature of serving with this backend."""
        needs = tuple(
            Need(self.module, f"{self.stock}.{method}", parameters, mentions)
            for method, parameters, mentions in self.methods
        )
        replaced = tuple(need for need in needs if need.name.rpartition(".")[2] in _REPLACED)
        does = f"dense models with --attention-backend {self.name}"
        return Feature(self.name, does, needs, "no server with that backend", replaced)


_DECODE = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
TORCH_NATIVE = Backend(
    "torch_native",
    "srt.layers.attention.torch_native_backend",
    "TorchNativeAttnBackend",
    "torch_native",
    (
        ("forward_decode", _DECODE, ("req_to_token_pool", "token_to_kv_pool", "req_pool_indices", "seq_lens")),
        ("forward_extend", _DECODE, ("token_to_kv_pool",)),
    ),
)
FLASHINFER = Backend(
    "flashinfer",
    "srt.layers.attention.flashinfer_backend",
    "FlashInferAttnBackend",
    "flashinfer",
    (
        ("forward_decode", _DECODE, ("forward_metadata", "decode_wrappers", "token_to_kv_pool")),
        ("forward_extend", _DECODE, ("token_to_kv_pool",)),
        ("init_forward_metadata", ("forward_batch",), ("indices_updater_decode", "decode_wrappers")),
        ("init_forward_metadata_out_graph", ("forward_batch", "in_capture"), ("decode_cuda_graph_metadata",)),
        ("_create_decode_wrappers", ("bs", "num_tokens"), ("workspace_buffer",)),
    ),
)
FLASH_ATTENTION = Backend(
    "fa3",
    "srt.layers.attention.flashattention_backend",
    "FlashAttentionBackend",
    "flash_attention",
    (
        ("forward_decode", (*_DECODE, "return_lse"), ("page_table", "cache_seqlens_int32", "scheduler_metadata")),
        ("forward_extend", _DECODE, ("token_to_kv_pool",)),
    ),
)
BACKENDS = (TORCH_NATIVE, FLASHINFER, FLASH_ATTENTION)


def make_backend_class(stock: Any, allow_unread: bool = False) -> Any:
    """Make the subclass of an attention backend that decodes by each `LayerRole`; return such a subclass as it is.

    Args:
        stock: SGLang's class.
        allow_unread: whether the source of what the subclass replaces may be none that was read.

    Raises:
        ProofError: if nobody wrote a subclass for the backend, or this SGLang lacks what the subclass needs.
    """
    if hasattr(stock, _STOCK):
        return stock
    named = (stock.__module__, stock.__qualname__)
    backend = next((item for item in BACKENDS if (f"sglang.{item.module}", item.stock) == named), None)
    if backend is None:
        names = ", ".join(item.name for item in BACKENDS)
        raise ProofError(
            f"the attention backend is {stock.__qualname__}, expected one that can decode over chosen pages:"
            f" --attention-backend {names}"
        )
    source = SglangSource.installed()
    reason = None if source is None else source.refusal(backend.feature)
    if reason is not None:
        raise ProofError(f"--attention-backend {backend.name} {reason}")
    unread = None if source is None or allow_unread else source.unread(backend.feature)
    if unread is not None:
        raise ProofError(f"{unread}; expected one of those, or {UNREAD_FLAG}")
    make: Callable[[Any], Any] = import_module(f"{__package__}.{backend.home}").make_backend_class
    made = make(stock)
    made.__name__ = made.__qualname__ = f"PageSelecting{stock.__name__}"
    setattr(made, _STOCK, stock)
    return made
