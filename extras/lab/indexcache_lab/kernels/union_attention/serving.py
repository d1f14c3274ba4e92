"""Attention over unions in SGLang's prompts, where it is faster than SGLang's own kernels.

The first layer of a group on this rank, most often F, unites the selections of a pass; the S layers behind it take the
unions from the pass. What unions were like, and so whether the next pass is faster with them, comes to the host while
other work goes on: nothing waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from indexcache_lab.kernels.union_attention import QUERIES, ROWS, Unions, hopper, naive, union_attention, unite
from sglang_indexcache.families.dsa.blocks.grouped import GROUPED, selecting_in_blocks
from sglang_indexcache.families.dsa.exact import ExactAttention
from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.refusal import UNION_FLAG
from sglang_indexcache.pattern import Pattern

LEAST_ROWS = 1024  # of a pass; with fewer, blocks don't fill a GPU
WAIT = 64  # passes after one that was slower, until unions are tried again
UNITED, SGLANGS = "unions", "sglang"
_UNIONS = "_indexcache_unions"


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


@dataclass(frozen=True)
class Sizes:
    """Means of the blocks of a pass: `keys` of a union, and `span`, rows of the cache from its first to its last."""

    keys: float
    span: float


def pays(sizes: Sizes, *, queries: int, layers: int, topk: int, cache: int) -> bool:
    """Return whether unions are faster than FlashMLA, by straight lines through the times of an H200.

    They are nanoseconds a block of 8, 4 or 2 queries (docs/evidence/kernels.md, attention over unions), at 128K keys
    and 2,048 of a selection: 4.2 selections for 8 heads in one layer, 5.3 in each of four.

    Args:
        sizes: of the unions.
        queries: of a block.
        layers: layers that have the same unions.
        topk: keys of a selection.
        cache: rows of the cache; with more than a million, marks are for fewer blocks than a GPU works on.
    """
    uniting = 20 * queries + 0.0062 * sizes.span * max(1.0, cache / 2**20)
    return 100 + 0.31 * sizes.keys + uniting / layers < 0.95 * 0.23 * queries * topk


class Pace:
    """Decides whether a group of layers attends over unions in its next pass, by the unions of its last one.

    Args:
        device: of the unions.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = torch.empty(2, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._seen: dict[str, int] | None = None  # arguments of `pays` for what is on its way
        self._wait = 0

    def goes(self) -> bool:
        """Return whether the next pass goes by unions."""
        if self._seen is not None and (self._copied is None or self._copied.query()):  # type: ignore[no-untyped-call]
            keys, span = self._host.tolist()
            self._wait = 0 if pays(Sizes(keys, span), **self._seen) else WAIT
            self._seen = None
        self._wait -= self._wait > 0
        return self._wait == 0

    def see(self, unions: Unions, **others: int) -> None:
        """Start to copy the sizes of unions; `others` are arguments of `pays`."""
        if self._seen is not None:
            return
        last = (unions.counts - 1).clamp_min(0).long()[:, None]
        span = (unions.keys.gather(1, last)[:, 0] - unions.keys[:, 0]).where(unions.counts > 0, 0)
        self._host.copy_(torch.stack([unions.counts, span]).float().mean(1), non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._seen = {"queries": unions.queries, "cache": unions.cache, **others}


@dataclass
class Group:
    """Layers of this rank that attend to the selection of one layer, in the order of a pass."""

    layers: list[int]
    pace: Pace


class UnionAttention(ExactAttention):
    """See `ExactAttention`: bfloat16 on Hopper, in absorbed MLA of up to 32 heads, a power of two."""

    def __init__(self, served: Served) -> None:
        heads, on_cpu = served.heads, served.device.type == "cpu"
        queries = min(max(QUERIES), ROWS // heads) if heads else 0
        if queries not in QUERIES or heads & (heads - 1):
            raise ProofError(f"{heads} heads a rank can't be combined with {UNION_FLAG}, expected 1, 2, 4, 8, 16 or 32")
        if served.dtype != torch.bfloat16 and not on_cpu:
            raise ProofError(f"a KV cache of {served.dtype} can't be combined with {UNION_FLAG}, expected bfloat16")
        q = torch.empty((1, heads, served.dim), dtype=torch.bfloat16, device=served.device)
        if not on_cpu and not hopper.fits(q, served.v_dim):
            raise ProofError(
                f"{UNION_FLAG} does not run here: expected a Hopper GPU, Triton 3.5 to 3.8 and absorbed MLA of"
                f" {hopper.DIM} dimensions (here {served.dim})"
            )
        self._served, self._queries, self._passes = served, queries, Counter({UNITED: 0, SGLANGS: 0})
        self._groups: dict[int, Group] = {}
        for layer, selecting in sorted(served.selecting.items()):
            self._groups.setdefault(selecting, Group([], Pace(served.device))).layers.append(layer)
        with torch.inference_mode():
            self._check()

    @classmethod
    def on(cls, backend: Any, pattern: Pattern, modules: Mapping[int, Any], dtype: torch.dtype) -> Self:
        """See `ExactAttention.on`; in all layers that don't select in blocks."""
        kernel, in_blocks = getattr(backend, "dsa_prefill_impl", None), selecting_in_blocks(pattern)
        if kernel not in GROUPED:
            raise ProofError(
                f"--dsa-prefill-backend {kernel} can't be combined with {UNION_FLAG}, expected one of"
                f" {', '.join(GROUPED)}"
            )
        alone = {layer: found for layer, found in enumerate(pattern.source_layers) if layer not in in_blocks}
        selecting = {layer: found for layer, found in alone.items() if layer in modules}
        shapes = {
            (module.num_local_heads, module.kv_lora_rank + module.qk_rope_head_dim, module.kv_lora_rank)
            for module in map(modules.__getitem__, selecting)
        }
        if len(shapes) != 1:
            raise ProofError(
                f"{UNION_FLAG} has {len(shapes)} kinds of layers here that select for each query, expected 1"
            )
        heads, dim, v_dim = shapes.pop()
        device, topk = torch.device(backend.device), backend.dsa_index_topk
        return cls(
            Served(device=device, dtype=dtype, heads=heads, dim=dim, v_dim=v_dim, topk=topk, selecting=selecting)
        )

    @property
    def layers(self) -> Collection[int]:
        """See `ExactAttention.layers`."""
        return self._served.selecting

    @property
    def passes(self) -> Mapping[str, int]:
        """See `ExactAttention.passes`."""
        return self._passes

    def begin(self, layer: int, forward_batch: Any) -> None:
        """See `ExactAttention.begin`: unions of an earlier group, or of a pass with the same object, end here."""
        if layer == self._group(layer).layers[0]:
            vars(forward_batch).pop(_UNIONS, None)

    def attend(self, layer: int, forward_batch: Any, given: Mapping[str, Any]) -> Tensor | None:
        """See `ExactAttention.attend`."""
        if given.get("attn_sink") is not None:
            raise ProofError(f"attention sinks can't be combined with {UNION_FLAG}")
        group, kept, q = self._group(layer), vars(forward_batch), given["q_all"]
        kv = given["kv_cache"].view(-1, q.shape[2])
        if layer == group.layers[0]:
            unions = self._unite(group, given["page_table_1"], len(kv))
            self._passes[SGLANGS if unions is None else UNITED] += 1
            kept[_UNIONS] = (self._served.selecting[layer], unions)
        selecting, unions = kept.get(_UNIONS, (None, None))
        if layer == group.layers[-1]:
            kept.pop(_UNIONS, None)  # their memory is free for other layers
        if unions is None or selecting != self._served.selecting[layer]:
            return None
        return self._attend(q, kv, unions, given["sm_scale"], given["v_head_dim"])

    def _group(self, layer: int) -> Group:
        return self._groups[self._served.selecting[layer]]

    def _unite(self, group: Group, table: Tensor, cache: int) -> Unions | None:
        """Return unions of a pass that goes by them."""
        capturing = table.is_cuda and torch.cuda.is_current_stream_capturing()
        if len(table) < LEAST_ROWS or capturing or not group.pace.goes():
            return None
        unions = unite(table, queries=self._queries, cache=cache)
        group.pace.see(unions, layers=len(group.layers), topk=table.shape[1])
        return unions

    def _attend(self, q: Tensor, kv: Tensor, unions: Unions, scale: float, v_dim: int) -> Tensor:
        out = q.new_empty(*q.shape[:2], v_dim)
        if q.is_cuda:
            if q.dtype != torch.bfloat16 or kv.dtype != torch.bfloat16 or not q.is_contiguous():
                raise ProofError(f"queries are {q.dtype} and keys {kv.dtype}, expected contiguous ones of bfloat16")
            hopper.union_attention(q, kv, unions, scale, out)
            return out
        return union_attention(q, kv, unions, scale=scale, v_dim=v_dim, out=out)

    def _check(self) -> None:
        """Compare kernels with the definition; they are compiled here, for odd and even rows, not in a request."""
        served, generator = self._served, torch.Generator().manual_seed(0)
        dtype = torch.bfloat16 if served.device.type == "cuda" else torch.float32
        keys, scale = 2 * served.topk, 1 / math.sqrt(served.dim)
        kv = torch.randn(keys, served.dim, generator=generator).to(dtype)
        for rows in (2 * self._queries, 2 * self._queries + 1):
            q = torch.randn(rows, served.heads, served.dim, generator=generator).to(dtype)
            table = torch.stack([torch.randperm(keys, generator=generator)[: served.topk] for _ in range(rows)]).int()
            table[1, served.topk // 2 :], table[-1] = -1, -1
            wanted = q.new_empty(rows, served.heads, served.v_dim)
            naive.union_attention(q, kv, naive.unite(table, self._queries, keys), scale, wanted)
            unions = unite(table.to(served.device), queries=self._queries, cache=keys)
            found = self._attend(q.to(served.device), kv.to(served.device), unions, scale, served.v_dim).cpu()
            if not (found.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm():
                raise ProofError(f"attention over unions differs from its definition here; expected no {UNION_FLAG}")
