"""SGLang's own backend and hybrid, without their kernels, below a stand-in of a model and its runner."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from indexcache_minimax.family.index_calls import FUNCTIONS, OPERATIONS

BACKEND = "sglang.srt.layers.attention.minimax_sparse_backend"
FIRST = 3
"""The first layer with an index."""


class Pool:
    """One key head; nothing is stored."""

    main_pool = SimpleNamespace(head_num=1)

    def set_fused_kv_index_buffer(self, *given: Any) -> None:
        pass

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(8, 1, 4), torch.zeros(8, 1, 4)

    def get_index_k_buffer(self, layer: int) -> Tensor:
        return torch.zeros(8, 1, 4)


class MiniMaxM3Attention(nn.Module):
    """What is asked of SGLang's module of this name; a pass goes from it through SGLang's backend."""

    is_sparse_attention_layer = True
    num_idx_heads = num_kv_heads = 1

    def __init__(self, layer: int, backend: Any) -> None:
        super().__init__()
        scales = dict.fromkeys([f"{name}_scale_float" for name in ("q", "k", "v", "idx_q", "idx_k", "idx_v")])
        self.attn = SimpleNamespace(layer_id=layer, **scales)
        self.index_qkv_proj = nn.Linear(2, 2, bias=False)
        self.index_q_norm, self.index_k_norm = nn.LayerNorm(2, bias=False), nn.LayerNorm(2, bias=False)
        self._backend = [backend]

    def forward(self, positions: Any, hidden_states: Tensor, forward_batch: Any) -> None:
        backend, q = self._backend[0], torch.full((len(hidden_states), 1, 4), float(self.attn.layer_id))
        call = backend.forward_decode if forward_batch.forward_mode.is_decode() else backend.forward_extend
        call(q, q, q, self.attn, forward_batch, idx_q=q, idx_k=q, idx_v=None)


class Served:
    """A model runner of `letters` layers with an index: `attend` says whose choice each of them attends to.

    Kernels are stand-ins below SGLang's `minimax_sparse_prefill` and `minimax_sparse_decode`: what chooses returns its
    layer's number, what attends writes down the number that it is handed.
    """

    def __init__(self, letters: int, patch: pytest.MonkeyPatch, **changes: Any) -> None:
        module, operations = importlib.import_module(BACKEND), importlib.import_module(OPERATIONS)
        patch.setattr(operations, FUNCTIONS[0], lambda **given: (None, self._choose(given["q"])))
        patch.setattr(operations, FUNCTIONS[1], lambda **given: (None, self._choose(given["q"]), None))
        patch.setattr(operations, "flash_prefill_with_gqa_share_sparse", self._attend)
        patch.setattr(operations, "flash_decode_with_gqa_share_sparse", self._attend)
        self.modes = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self.layers = list(range(FIRST, FIRST + letters))
        self.seen: list[int] = []
        self.backend: Any = object.__new__(module.MiniMaxSparseAttnBackend)
        nothing = (
            "is_npu is_hip hisparse_coordinator fp8_attn_gemm use_msa use_dense_sparse_decode _use_msa_decode"
            " indexer_cp _msa_owns_decode _msa_dec_meta _loc_mapping _topk_cache_owner speculative_num_draft_tokens"
        )
        sizes = (
            "_max_seqlen_q _max_seqlen_k block_size_q block_size_k page_size init_blocks local_blocks index_topk_freq"
        )
        vars(self.backend).update(
            dict.fromkeys(nothing.split()),
            **dict.fromkeys(sizes.split(), 1),
            kv_pool=Pool(),
            req_to_token=torch.zeros(1, 8, dtype=torch.int32),
            score_type="max",
            topk_blocks=2,
            sparse_layer_ids=list(self.layers),
            disable_value_layer_ids=set(self.layers),
            _topk_cache={},
            _decode_topk_buf={},
            # as SGLang's `__init__` leaves them on CUDA
            index_cache_enabled=False,
            _idx_group_size=1,
            _topk_is_source=dict.fromkeys(self.layers, True),
            _topk_group_of_layer={layer: site for site, layer in enumerate(self.layers)},
        )
        vars(self.backend).update(changes)
        hybrid = object.__new__(module.MiniMaxHybridAttnBackend)
        vars(hybrid).update(sparse=self.backend, dense=None, sparse_layer_ids=self.layers)
        self.model = nn.ModuleList([MiniMaxM3Attention(layer, self.backend) for layer in self.layers])
        self.runner = SimpleNamespace(attn_backend=hybrid, model=self.model)

    def _choose(self, q: Tensor) -> Tensor:
        return torch.full((1, len(q), 2), int(q.flatten()[0]), dtype=torch.int32)

    def _attend(self, *, q: Tensor, topk_idx: Tensor, **_: Any) -> Tensor:
        self.seen.append(int(topk_idx.flatten()[0]))
        return q

    def batch(self, decoding: bool, mode: str = "") -> Any:
        lengths = torch.tensor([4, 4]) if decoding else torch.tensor([2])
        return SimpleNamespace(
            forward_mode=self.modes[mode or ("DECODE" if decoding else "EXTEND")],
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            extend_seq_lens_cpu=None if decoding else [2],
            req_pool_indices=torch.zeros(len(lengths), dtype=torch.int64),
            out_cache_loc=None,
            minimax_m3_precached_sparse_layers=None,
        )

    def attend(
        self, decoding: bool, layers: Iterable[int] | None = None, before: Callable[[int], None] = lambda layer: None
    ) -> list[int]:
        """Run layers over two tokens; return for each the layer whose choice it attended to."""
        self.seen.clear()
        batch = self.batch(decoding)
        self.backend.init_forward_metadata_out_graph(batch)
        self.backend._prefill_seqblock_meta = (batch, *[None] * 3, torch.zeros(1), 1, 1)
        for layer in self.layers if layers is None else layers:
            before(layer)
            self.model[layer - FIRST](positions=None, hidden_states=torch.zeros(2, 4), forward_batch=batch)
        return list(self.seen)
