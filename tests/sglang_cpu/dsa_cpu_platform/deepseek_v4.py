"""DeepSeek-V4 without a GPU: what is CUDA there, in float32 and plain torch.

Real are the model, its loading, the mixtures of experts, the residual streams, KV pools and page tables, metadata, and
`forward_c4_indexer` with its top-k. Entries and window keys lie in side buffers by slot, since the pools hold fp8 pages
for kernels. Read: sglang/srt/models/deepseek_v4.py, layers/attention/deepseek_v4_backend.py, dsv4/ of 0.5.23.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsa_cpu_platform import recorder

_ROPE = 64
_PAGE = 64  # index keys a page
_WINDOW = 128
_SLOTS = 1 << 13  # more than the tests' --max-total-tokens


def replace_all(model: Any) -> None:
    """Put plain torch in the place of everything that needs CUDA, once the model is loaded; all of it in float32."""
    from sglang.kernels.ops.layernorm import mhc, mhc_head
    from sglang.srt.layers.attention import deepseek_v4_backend
    from sglang.srt.layers.attention.dsv4 import indexer
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.models import deepseek_v2, deepseek_v4
    from sglang.test.kernels.mhc import hc_split_sinkhorn_torch

    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()
    kv_cache_configurator.reject_out_of_tree_path = lambda *_, **__: None
    deepseek_v4.fused_q_norm_rope, deepseek_v4.fused_rope_inplace = q_norm_rope, rope_inplace
    deepseek_v4.MQALayer._compute_kv_to_cache = keep_window_key
    deepseek_v4.get_mhc_ops = lambda: mhc
    deepseek_v2.silu_and_mul_clamp = silu_and_mul_clamp
    mhc.hc_split_sinkhorn, mhc.mhc_combine = hc_split_sinkhorn_torch, combine
    mhc_head.fused_hc_head = head_of(deepseek_v4.hc_head_torch)
    backend = deepseek_v4_backend.DeepseekV4AttnBackend
    backend.forward_indexer_compressor = backend.forward_core_compressor = compress
    backend.forward = attend
    deepseek_v4_backend._init_compression_metadata_triton = compression_metadata
    deepseek_v4_backend._create_flashmla_metadata = lambda: None
    deepseek_v4_backend.create_paged_compressor_data = lambda *_, **__: None
    _let_index_topk_be_small(deepseek_v4_backend)
    indexer.C4Indexer.compute_q = index_queries
    indexer.fp8_paged_mqa_logits_torch = index_logits
    real = indexer.C4Indexer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        _record(kwargs["attn_backend"], kwargs["forward_batch"], self.layer_id, "indexer")

    indexer.C4Indexer.forward = forward


def _let_index_topk_be_small(module: Any) -> None:
    """An assertion wants 512 or 1024; the kernels behind it are not here."""
    owner = module.DSV4AttnMetadata
    source = textwrap.dedent(inspect.getsource(owner.init_flashmla_related))
    changed = source.replace("assert self.index_topk in (512, 1024), (", "assert self.index_topk, (")
    assert changed != source
    names: dict[str, Any] = {}
    exec(changed, module.__dict__, names)
    owner.init_flashmla_related = names["init_flashmla_related"]
    module._pad_last_dim = lambda x, *_, **__: x  # to 64, which kernels want


def rope(x: Tensor, frequencies: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Rotate pairs of `[tokens, ..., 64]` by the rows of complex `frequencies` `[positions, 32]`."""
    turns = frequencies[positions.long()]
    turns = turns.conj() if inverse else turns
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2).contiguous())
    while turns.dim() < pairs.dim():
        turns = turns.unsqueeze(1)
    return torch.view_as_real(pairs * turns).flatten(-2)


def _rotated_end(x: Tensor, frequencies: Tensor, positions: Tensor) -> Tensor:
    return torch.cat([x[..., :-_ROPE].float(), rope(x[..., -_ROPE:], frequencies, positions)], -1)


def q_norm_rope(q: Tensor, q_out: Tensor, eps: float | None, frequencies: Tensor, positions: Tensor) -> None:
    """Replaces `fused_q_norm_rope`."""
    x = q.float()
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    q_out.copy_(_rotated_end(x, frequencies, positions))


def rope_inplace(x: Tensor, k: Any, frequencies: Tensor, positions: Tensor, inverse: bool = False) -> None:
    """Replaces `fused_rope_inplace`."""
    x.copy_(rope(x, frequencies, positions, inverse))


def _side(pool: Any, kind: str, layer: int, width: int) -> Tensor:
    """`[slots, width]` float32 beside the KV pool."""
    buffers: dict[Any, Tensor] = pool.__dict__.setdefault("_cpu_buffers", {})
    if (kind, layer) not in buffers:
        buffers[kind, layer] = torch.zeros(_SLOTS, width)
    return buffers[kind, layer]


def _pool() -> Any:
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return get_token_to_kv_pool()


def keep_window_key(
    self: Any,
    x: Tensor,
    positions: Tensor,
    forward_batch: Any,
    attn_backend: Any,
    qkv_a: Any = None,
    q_rope: Any = None,
) -> None:
    """Replaces `MQALayer._compute_kv_to_cache`."""
    kv = qkv_a[..., self.q_lora_rank :] if qkv_a is not None else self.wkv(x)[0]
    kv = _rotated_end(self.kv_norm(kv.contiguous()), self.freqs_cis, positions)
    _side(_pool(), "window", self.layer_id, kv.shape[-1])[forward_batch.out_cache_loc] = kv


def _requests(backend: Any, forward_batch: Any) -> Iterator[tuple[Tensor, int, int]]:
    """For each request the slots of its tokens, how many stood there before, and how many there are now."""
    ends = forward_batch.seq_lens.tolist()
    new = forward_batch.extend_seq_lens.tolist() if forward_batch.forward_mode.is_extend() else [1] * len(ends)
    for request, end, count in zip(forward_batch.req_pool_indices.tolist(), ends, new, strict=True):
        yield backend.req_to_token[request, :end].long(), end - count, end


def compress(self: Any, x: Tensor, forward_batch: Any, layer_id: int, compressor: Any) -> None:
    """Replaces both compressors: an entry for each group of tokens that the new ones complete."""
    ratio, width = compressor.ratio, compressor.head_dim
    kind = "index" if compressor.is_in_indexer else "entries"
    projected = F.linear(x.float(), compressor.wkv_gate.weight.float())
    raw = _side(_pool(), f"raw {kind}", layer_id, projected.shape[1])
    raw[forward_batch.out_cache_loc] = projected[: len(forward_batch.out_cache_loc)]
    entries = _side(_pool(), kind, layer_id, width)
    bias = compressor.ape.data.float().view(-1, width)  # of the group before, then of this one, as loaded
    for slots, start, end in _requests(self, forward_batch):
        for group in range(start // ratio, end // ratio):
            tokens = raw[slots[group * ratio : (group + 1) * ratio]]
            kv, gate = (
                tokens[:, -2 * width :].chunk(2, 1)
                if compressor.coff == 1
                else (tokens[:, width : 2 * width], tokens[:, 3 * width :])
            )
            gate = gate + bias[-ratio:]
            if compressor.coff == 2 and group:
                before = raw[slots[(group - 1) * ratio : group * ratio]]
                kv = torch.cat([before[:, :width], kv])
                gate = torch.cat([before[:, 2 * width : 3 * width] + bias[:ratio], gate])
            entry = (kv * gate.softmax(0)).sum(0)
            norm = compressor.norm
            entry = norm.weight.float() * entry * torch.rsqrt(entry.square().mean() + norm.variance_epsilon)
            at = torch.tensor([group * ratio])
            entries[int(slots[(group + 1) * ratio - 1]) // ratio] = _rotated_end(entry[None], compressor.freqs_cis, at)[
                0
            ]


_scoring: list[int] = []  # the layer whose index keys `index_logits` reads


def index_queries(self: Any, q_lora: Tensor, positions: Tensor, weight: Tensor, q_lora_quant: Any = None) -> Any:
    """Replaces `C4Indexer.compute_q`: float32 queries `[tokens, heads, dim]` and weights `[tokens, heads, 1]`."""
    _scoring[:] = [self.layer_id]
    q = self.wq_b(q_lora)[0].view(-1, self.n_local_heads, self.head_dim)
    return _rotated_end(q, self.freqs_cis, positions), (weight.float() * self.weight_scale).unsqueeze(-1)


def index_logits(
    q: Tensor, cache: Any, weight: Tensor, lengths: Tensor, page_table: Tensor, _: Any, most: int, clean: bool = True
) -> Tensor:
    """Replaces `fp8_paged_mqa_logits_torch`: `[queries, entries]`, from the index keys in float32."""
    keys = _side(_pool(), "index", _scoring[0], q.shape[-1])
    pages = page_table.long().clamp_min(0)
    slots = (pages[:, :, None] * _PAGE + torch.arange(_PAGE)).flatten(1)
    scores = torch.full((len(q), max(most, slots.shape[1])), float("-inf"))
    for row in range(len(q)):
        visible = int(lengths[row])
        heads = torch.relu(keys[slots[row, :visible]] @ q[row, 0].T)
        scores[row, :visible] = heads @ weight[row]
    return scores


def attend(
    self: Any,
    q: Tensor,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    compress_ratio: int,
    save_kv_cache: bool = True,
    attn_sink: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Replaces `DeepseekV4AttnBackend.forward`: the window, and the chosen or all complete entries."""
    pool, width, first = _pool(), q.shape[-1], 0
    window = _side(pool, "window", layer.layer_id, width)
    output = torch.zeros(q.shape[0], q.shape[-2], width)
    chosen = self.forward_metadata.core_metadata.c4_sparse_page_indices
    if compress_ratio == 4:
        _record(self, forward_batch, layer.layer_id, "attention")
    for slots, start, end in _requests(self, forward_batch):
        rows = slice(first, first + end - start)
        first = rows.stop
        at, keys = torch.arange(start, end)[:, None], torch.arange(end)[None]
        kv, visible = [window[slots]], [(keys <= at) & (keys > at - _WINDOW)]
        if compress_ratio:
            count = end // compress_ratio
            places = slots[compress_ratio - 1 : count * compress_ratio : compress_ratio] // compress_ratio
            kv.append(_side(pool, "entries", layer.layer_id, width)[places])
            complete = torch.arange(count)[None] < (at + 1) // compress_ratio
            if compress_ratio == 4:
                complete = (chosen[rows, None].long() == places[None, :, None]).any(-1)
            visible.append(complete)
        scores = torch.einsum("thd,kd->htk", q[rows].float(), torch.cat(kv)) * self.softmax_scale
        scores = scores.masked_fill(~torch.cat(visible, 1), float("-inf"))
        assert attn_sink is not None
        sink = attn_sink.float()[: q.shape[-2], None, None].expand(-1, end - start, 1)
        shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        output[rows] = torch.einsum("htk,kd->thd", shares, torch.cat(kv))
    return output.to(q.dtype)


def _record(backend: Any, forward_batch: Any, layer: int, what: str) -> None:
    """Which entries of its request each token has in the buffer."""
    chosen, first, found = backend.forward_metadata.core_metadata.c4_sparse_page_indices, 0, []
    positions: list[int] = []
    for slots, start, end in _requests(backend, forward_batch):
        places = slots[3 : end // 4 * 4 : 4] // 4
        rows = chosen[first : first + end - start].long()
        equal = (rows[:, :, None] == places) & (rows[:, :, None] >= 0)
        index = torch.where(equal.any(-1), equal.long().argmax(-1) if len(places) else rows, -1)
        found.append(index.sort(-1, descending=True).values.int())
        positions += range(start, end)
        first += end - start
    recorder.record(layer, forward_batch, torch.tensor(positions), torch.cat(found), what)


def compression_metadata(
    seq_lens: Tensor,
    positions: Tensor,
    raw_out_loc: Tensor,
    page_table: Tensor,
    page_size: int = 256,
    compute_page_indices: bool = True,
) -> Any:
    """Replaces `_init_compression_metadata_triton`: where entries go, how many there are, where those of 128 lie."""
    out = [torch.where(seq_lens % ratio == 0, raw_out_loc // ratio, 0) for ratio in (4, 128)]
    counts = [(seq_lens // ratio).to(torch.int32) for ratio in (4, 128)]
    entries, per_page = torch.arange(max(int(counts[1].max()), 1)), page_size // 128
    pages = page_table.long()[:, (entries // per_page).clamp(max=page_table.shape[1] - 1)]
    places = (pages * per_page + entries % per_page).masked_fill(entries >= counts[1][:, None], -1).int()
    clamped = [count.clamp(min=1) for count in counts]
    return out[0], None, counts[0], clamped[0], out[1], None, counts[1], clamped[1], places


def combine(x: Tensor, pre: Tensor, mult: int, dtype: torch.dtype) -> Tensor:
    """Replaces `mhc_combine`: the residual streams as one."""
    return (pre.unsqueeze(-1) * x.view(x.shape[0], mult, -1)).sum(1).to(dtype)


def silu_and_mul_clamp(gate_up: Tensor, output: Tensor, limit: float) -> None:
    """Replaces the kernel of that name."""
    gate, up = gate_up.float().chunk(2, -1)
    output.copy_(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


def head_of(reference: Any) -> Any:
    """`fused_hc_head` as SGLang's own torch reference."""

    def head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: Any = None, hc_eps: Any = None) -> Any:
        return reference(x, fn, scale, base, norm_eps=norm_eps, hc_eps=hc_eps)

    return head
