"""MiniMax-M3 without a GPU: the four functions of SGLang that run Triton, from their arguments, in plain torch.

Real are the model, its loading, experts, the backend and its hybrid, pools, page tables and metadata. Read:
sglang/kernels/ops/attention/minimax_sparse and srt/models/minimax_m3.py of 0.5.23.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from indexcache_minimax.family.index_calls import FUNCTIONS, OPERATIONS

RECORD: list[Path] = []
"""Where calls are written, if anywhere: a line for each."""


def install(record: str | None = None) -> None:
    """Put plain torch in the place of what needs a GPU, in this process."""
    RECORD[:] = [] if record is None else [Path(record)]
    configurator = importlib.import_module("sglang.srt.mem_cache.kv_cache_configurator")
    configurator.reject_out_of_tree_path = lambda *_, **__: None  # type: ignore[attr-defined]
    experts = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    experts.swiglu_gpt_oss_sigmoid_alpha = swiglu  # type: ignore[attr-defined]
    operations = importlib.import_module(OPERATIONS)
    stand_ins = dict(zip(FUNCTIONS, (choose_for_prompts, choose_for_steps), strict=True))
    attention = dict.fromkeys(("flash_prefill_with_gqa_share_sparse", "flash_decode_with_gqa_share_sparse"), attend)
    for name, function in {**stand_ins, **attention}.items():
        setattr(operations, name, function)


def swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """Replaces what plain torch has for experts, which takes gates and values in turn, as GPT-OSS stores them."""
    gate, up = x.chunk(2, -1)
    return gate.clamp(max=limit) * torch.sigmoid(gate.clamp(max=limit) * alpha) * (up.clamp(-limit, limit) + 1)


def _note(**what: Any) -> None:
    for path in RECORD:
        with path.open("a") as file:
            file.write(json.dumps(what) + "\n")


def _requests(given: dict[str, Any]) -> Iterator[tuple[slice, Tensor, int]]:
    """For each request its rows among the queries, the slots of its tokens, and how many stood there before."""
    lengths, slots = given["seq_lens"].tolist(), given["slot_ids"].tolist()
    ends = given["cu_seqlens"].tolist() if "cu_seqlens" in given else list(range(len(lengths) + 1))
    for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        rows = slice(ends[row], ends[row + 1])
        yield rows, given["req_to_token"][slot, :length].long(), length - (rows.stop - rows.start)


def _chosen(given: dict[str, Any], block: int) -> Tensor:
    """`[index heads, queries, topk]`: blocks by the greatest product of a key, the newest always, -1 for none."""
    q, topk = given["q"].float(), given["topk"]
    found = torch.full((q.shape[1], q.shape[0], topk), -1, dtype=torch.int32)
    for rows, slots, before in _requests(given):
        keys = given["k_cache"][slots].reshape(len(slots), -1).float()
        scores = torch.einsum("qhd,kd->hqk", q[rows], keys)
        at = torch.arange(before, len(slots))[:, None]
        scores = scores.masked_fill(torch.arange(len(slots)) > at, -torch.inf)
        blocks = -(-len(slots) // block)
        padded = torch.nn.functional.pad(scores, (0, blocks * block - len(slots)), value=-torch.inf)
        best = padded.unflatten(-1, (blocks, block)).amax(-1)
        newest = at // block - torch.arange(blocks)
        best = best.masked_fill((newest >= 0) & (newest < given["local_blocks"]), torch.inf)
        values, order = best.topk(min(topk, blocks), dim=-1)
        found[:, rows, : order.shape[-1]] = order.masked_fill(values == -torch.inf, -1).int()
    return found


def choose_for_prompts(**given: Any) -> tuple[None, Tensor]:
    """Replaces `flash_prefill_with_topk_index`."""
    _note(what="chose", mode="prompt", queries=given["q"].shape[0])
    return None, _chosen(given, given["block_size_k"])


def choose_for_steps(**given: Any) -> tuple[None, Tensor, None]:
    """Replaces `flash_decode_with_topk_idx`."""
    _note(what="chose", mode="step", queries=given["q"].shape[0])
    return None, _chosen(given, given["block_size"]), None


def attend(**given: Any) -> Tensor:
    """Replaces both functions of sparse attention: `[queries, heads, dim]` over the blocks in `topk_idx`."""
    q, chosen = given["q"], given["topk_idx"]
    block = given.get("block_size_k") or given["block_size"]
    output = torch.zeros_like(q)
    groups = q.shape[1] // chosen.shape[0]
    for rows, slots, before in _requests(given):
        keys, values = (given[name][slots].float().repeat_interleave(groups, 1) for name in ("k_cache", "v_cache"))
        at, places = torch.arange(before, len(slots))[:, None], torch.arange(len(slots))
        visible = (chosen[:, rows, :, None] == places // block).any(2) & (places <= at)
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~visible.repeat_interleave(groups, 0), -torch.inf)
        output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
    _note(what="attended", mode="prompt" if "cu_seqlens" in given else "step", queries=q.shape[0])
    return output
