"""Attention of the queries of a block together, in SGLang's prefill, where their layer selected in blocks.

FlashMLA's sparse kernel works on 64 heads at a time. A tensor-parallel rank has 8 to 32, so SGLang pads each query; the
queries of a block share most of their keys and fill what would be padding. A `GroupedAttention` stands on the attention
backend of one `ModelRunner`. It attends for the blocks and hands all other queries to SGLang's own method, as it does
with all of a pass where the layer did not select in blocks. Layers that never do so may attend through an extension.

Read: `forward_extend`, `_forward_flashmla_sparse` and `_forward_triton_sparse_mla` in
sglang/srt/layers/attention/dsa_backend.py of 0.5.17 and 0.5.23, flash_mla_interface.py of 0.5.23.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from indexcache_kernels.grouped_attention import Attend, grouped_attention, naive
from sglang_indexcache.families.dsa.blocks.selection import WholePlan, plan_for
from sglang_indexcache.families.dsa.exact import ExactAttention
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.sglang.hooks import refusing_around

EXTEND = "forward_extend"
KERNELS = ("_forward_flashmla_sparse", "_forward_triton_sparse_mla")  # the same arguments, in rows of queries
GROUPED = ("flashmla_sparse", "triton_sparse_mla")  # --dsa-prefill-backend
_TILE, _TILES = 64, (128, 64)  # heads that FlashMLA works on at a time, and those that it takes
_MODULES = ("sglang.kernels.ops.attention.flash_mla_interface", "sgl_kernel.flash_mla")
_PLACE = "_indexcache_grouped"


class GroupedAttention:
    """Attends from the queries of each block together, in place of methods of an attention backend.

    Args:
        backend: a `DeepseekSparseAttnBackend`.
        selecting: for each layer that attends to a selection in blocks, the layer that makes it.
        attend: attends to the keys that the queries of a block share.
        exact: attends in its layers, if there is one.
    """

    def __init__(
        self, backend: Any, selecting: Mapping[int, int], attend: Attend, exact: ExactAttention | None = None
    ) -> None:
        self.selecting, self.exact, self._attend = selecting, exact, attend
        self._plan: WholePlan | None = None
        self._pass: tuple[int, Any] | None = None  # a layer of `exact`, and its forward batch
        self._placed: dict[str, Any] = {}
        for name, replacement in ((EXTEND, self._extend), *((name, self._sparse) for name in KERNELS)):
            sglangs = getattr(backend, name, None)
            if sglangs is not None:
                guarded = partial(refusing_around(replacement), sglangs)
                self._placed[name] = guarded
                setattr(backend, name, guarded)
        names = list(inspect.signature(getattr(type(backend), EXTEND)).parameters)[1:]
        self._layer, self._batch = names.index("layer"), names.index("forward_batch")
        self._backend = backend
        setattr(backend, _PLACE, self)

    def stands(self) -> bool:
        """Return whether nothing has replaced what was placed."""
        return all(vars(self._backend).get(name) is placed for name, placed in self._placed.items())

    def _extend(self, sglangs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Note with which blocks a layer attends (around `forward_extend`)."""
        layer = (kwargs["layer"] if "layer" in kwargs else args[self._layer]).layer_id
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[self._batch]
        selecting = self.selecting.get(layer)
        self._plan = None if selecting is None else plan_for(batch, selecting)
        if self.exact is not None and layer in self.exact.layers:
            self._pass = (layer, batch)
            self.exact.begin(layer, batch)
        try:
            attended: Tensor = sglangs(*args, **kwargs)
        finally:
            self._plan = self._pass = None
        return attended

    def _sparse(self, sglangs: Callable[..., Tensor], **given: Any) -> Tensor:
        """Attend for the blocks of a pass, or in place of the kernel (around a sparse kernel)."""
        if self.exact is not None and self._pass is not None:
            exactly = self.exact.attend(*self._pass, given)
            return sglangs(**given) if exactly is None else exactly
        plan, q, kv, table = self._plan, given["q_all"], given["kv_cache"], given["page_table_1"]
        dim = q.shape[2]
        if plan is None or given.get("attn_sink") is not None:
            alone: Tensor = sglangs(**given)
            return alone
        kv = kv.view(-1, dim)
        out: Tensor = q.new_empty(*q.shape[:2], given["v_head_dim"])
        attend = partial(
            grouped_attention,
            queries=plan.queries_here,
            own=plan.queries,
            seen=plan.seen,
            scale=given["sm_scale"],
            v_dim=given["v_head_dim"],
            attend=self._attend,
        )
        if plan.begin is not None:  # one request's: no copies
            blocks = slice(plan.begin, plan.begin + plan.blocks * plan.queries_here)
            attend(q[blocks], kv, table[blocks], out=out[blocks])
        else:
            own = q[plan.members]
            out[plan.members] = attend(own, kv, table[plan.members], out=own.new_empty(*own.shape[:2], out.shape[2]))
        if len(plan.first) > plan.blocks:
            lengths = given.get("topk_length")
            if lengths is not None:
                lengths = lengths[plan.exact] if len(lengths) == len(q) else None
            rows = {"q_all": q[plan.exact], "page_table_1": table[plan.exact], "topk_length": lengths}
            out[plan.exact] = sglangs(**given | rows)
        if (here := plan.context.count(plan.count)) < len(out):
            out[here:] = 0  # rows of padding
        return out


def place(
    backend: Any, pattern: Pattern, heads: Mapping[int, int], ranks: int = 1, exact: ExactAttention | None = None
) -> GroupedAttention | None:
    """Group the queries of blocks in the attention of a backend, once, where that can be done.

    Args:
        backend: a `DeepseekSparseAttnBackend`.
        pattern: the pattern that is served.
        heads: heads of the attention of each layer that is on this rank.
        ranks: over how many ranks SGLang shares out prompts; each needs as many queries of a block, two at least.
        exact: what attends in layers that don't select in blocks.

    Raises:
        ProofError: if the result of FlashMLA is not what was read.
    """
    padded = {layer for layer, count in heads.items() if count < _TILE and _TILE % count == 0}  # by SGLang
    together = {item.layer for item in pattern.indexers if item.queries % ranks == 0 and item.queries > ranks}
    every = selecting_in_blocks(pattern)
    selecting = {layer: found for layer, found in every.items() if layer in padded and found in together}
    if getattr(backend, "dsa_prefill_impl", None) not in GROUPED or placed(backend) is not None:
        return None
    device = torch.device(backend.device)
    attend: Attend | None = naive.attend
    if selecting and device.type != "cpu":
        attend = flash_mla_on(device)
        selecting = {} if attend is None else selecting
    if not selecting and exact is None:
        return None
    return GroupedAttention(backend, selecting, attend or naive.attend, exact)


def placed(backend: Any) -> GroupedAttention | None:
    """Return what stands on a backend.

    Raises:
        ProofError: if something else has replaced a part of it.
    """
    found: GroupedAttention | None = getattr(backend, _PLACE, None)
    if found is not None and not found.stands():
        raise ProofError("something has replaced the attention of blocks on SGLang's backend, expected nothing")
    return found


def selecting_in_blocks(pattern: Pattern) -> dict[int, int]:
    """Return the layers that attend to a selection in blocks, each with the layer that makes it."""
    in_blocks = {item.layer for item in pattern.indexers}
    return {layer: found for layer, found in enumerate(pattern.source_layers) if found in in_blocks}


def flash_mla_on(device: torch.device) -> Attend | None:
    """Return FlashMLA's attention to common keys; `None` on devices where it was not tried.

    Raises:
        ProofError: if its denominators are not base-2 logarithms, as those of the versions that were read.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    kernel = None
    for name in _MODULES:
        with suppress(ImportError):
            kernel = import_module(name).flash_mla_sparse_fwd
            break
    if kernel is None:
        return None
    found = FlashMLA(kernel)
    with torch.inference_mode():
        _check(found, device)
    return found


class FlashMLA:
    """FlashMLA's sparse prefill (SGLang's `flash_mla_sparse_fwd`), for queries of any number of heads."""

    def __init__(self, kernel: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
        self._kernel = kernel
        self._lengths: dict[int, Tensor] = {}

    def __call__(  # noqa: PLR0917
        self, q: Tensor, kv: Tensor, keys: Tensor, scale: float, count: int, v_dim: int
    ) -> tuple[Tensor, Tensor]:
        """See `indexcache_kernels.grouped_attention.Attend`; rows are padded to what the kernel works on."""
        blocks = len(q)
        short = -q.shape[1] % _TILE
        rows = torch.nn.functional.pad(q, (0, 0, 0, short)) if short else q
        tile = next(size for size in _TILES if rows.shape[1] % size == 0)
        rows = rows.view(-1, tile, q.shape[2])
        parts = len(rows) // blocks
        keys = keys[:, None] if parts == 1 else keys.repeat_interleave(parts, 0)[:, None]
        lengths = self._lengths_of(len(rows), count, q.device)
        out, _, lse = self._kernel(q=rows, kv=kv[:, None], indices=keys, sm_scale=scale, d_v=v_dim, topk_length=lengths)
        return out.view(blocks, -1, v_dim), lse.view(blocks, -1)

    def _lengths_of(self, rows: int, count: int, device: torch.device) -> Tensor:
        found = self._lengths.get(count)
        if found is None or len(found) < rows:
            self._lengths[count] = found = torch.full((rows,), count, dtype=torch.int32, device=device)
        return found[:rows]


def _check(attend: Attend, device: torch.device) -> None:
    """Compare FlashMLA with the definition on a few keys."""
    generator = torch.Generator(device).manual_seed(0)
    q, kv = (torch.randn(rows, 576, generator=generator, device=device, dtype=torch.bfloat16) for rows in (2 * 64, 256))
    keys = torch.randperm(256, generator=generator, device=device).int().view(2, 128)
    arguments = (q.view(2, 64, 576), kv, keys, 1 / math.sqrt(576), 100, 512)
    (out, lse), (wanted, wanted_lse) = attend(*arguments), naive.attend(*arguments)
    if (out.float() - wanted).norm() > 0.02 * wanted.norm() or (lse - wanted_lse).abs().max() > 0.02:
        raise ProofError(
            "FlashMLA's results are not those of the versions that were read, so blocks can't be attended to together;"
            " expected --indexcache-no-grouping"
        )
