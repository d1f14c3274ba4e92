"""A stand-in for Megatron-Core's sparse attention: the names, arguments, shapes and layouts that the adapter relies on.

Read in megatron-core 0.16.1, core/transformer/experimental_attention_variant/dsa.py. Written for tests: a few linear
layers that compute what the names say, in any dtype, on a CPU.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn


class AttnMaskType(Enum):
    causal = 2
    padding = 1


class DSAIndexerLossLoggingHelper:
    saved: ClassVar[dict[int, float]] = {}

    @staticmethod
    def save_loss_to_tracker(
        loss: Tensor, layer_number: int, num_layers: int, reduce_group: Any = None, avg_group: Any = None
    ) -> None:
        DSAIndexerLossLoggingHelper.saved[layer_number] = loss.item()


class DSAIndexerLossAutoScaler(torch.autograd.Function):
    scale: ClassVar[float] = 1.0

    @staticmethod
    def forward(ctx: Any, output: Tensor, indexer_loss: Tensor) -> Tensor:
        ctx.save_for_backward(indexer_loss)
        return output

    @staticmethod
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor, Tensor]:
        return change, torch.full_like(ctx.saved_tensors[0], DSAIndexerLossAutoScaler.scale)


class WithBias(nn.Linear):
    """A linear layer that returns its bias beside the output, as Megatron's do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class DSAIndexer(nn.Module):
    def __init__(self, config: Any, tp: Any = None, cp: Any = None) -> None:
        super().__init__()
        self.config, self.index_topk = config, config.dsa_indexer_topk
        self.heads, self.dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        self.pg_collection = SimpleNamespace(tp=tp, cp=cp)
        self.linear_wq_b = WithBias(config.q_lora_rank, self.heads * self.dim, bias=False)
        self.linear_wk = WithBias(config.hidden_size, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim)
        self.linear_weights_proj = WithBias(config.hidden_size, self.heads, bias=False)

    def _rotated(self, item: Tensor) -> Tensor:
        """Rotate pairs by the positions of this rank, which has two chunks of the sequence."""
        length, cp = item.shape[0], self.pg_collection.cp
        ranks = 1 if cp is None else dist.get_world_size(cp)
        places = torch.arange(length * ranks, dtype=item.dtype)
        if ranks > 1:
            chunks = places.chunk(2 * ranks)
            places = torch.cat([chunks[dist.get_rank(cp)], chunks[2 * ranks - 1 - dist.get_rank(cp)]])
        angle = places.view(-1, 1, 1, 1) * 0.3
        one, two = item.chunk(2, dim=-1)
        return torch.cat([one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], dim=-1)

    def _compute_index_scores(self, q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("sbhd,tbd,sbh->bst", q, k, weights)  # never asked: the adapter takes its place

    def forward_with_scores(
        self, x: Tensor, qr: Tensor, mask: Tensor | None = None, packed_seq_params: Any = None
    ) -> tuple[Tensor, Tensor]:
        assert packed_seq_params is None
        length, batch, _ = x.shape
        q = self._rotated(self.linear_wq_b(qr)[0].view(length, batch, self.heads, self.dim))
        k = self._rotated(self.k_norm(self.linear_wk(x)[0]).unsqueeze(2)).squeeze(2)
        scores = self._compute_index_scores(q, self.linear_weights_proj(x)[0] * self.heads**-0.5, k)
        return scores, scores.topk(min(self.index_topk, length), dim=-1).indices


class DSAttention(nn.Module):
    def __init__(self, config: Any, layer_number: int, tp: Any = None, cp: Any = None) -> None:
        super().__init__()
        self.config, self.layer_number, self.softmax_scale = config, layer_number, config.head_dim**-0.5
        self.indexer = DSAIndexer(config, tp, cp)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        raise AssertionError("the adapter takes the place of this")


class Layer(nn.Module):
    """Projections around a sparse attention; a rank of tensor parallelism has some of the heads."""

    def __init__(self, config: Any, layer_number: int, tp: Any = None, cp: Any = None) -> None:
        super().__init__()
        self.config, hidden, width = config, config.hidden_size, config.heads * config.head_dim
        self.q_a, self.q_b = nn.Linear(hidden, config.q_lora_rank), nn.Linear(config.q_lora_rank, width)
        self.k, self.v, self.o = nn.Linear(hidden, width), nn.Linear(hidden, width), nn.Linear(width, hidden)
        self.core_attention = DSAttention(config, layer_number, tp, cp)
        self.tp = tp
        self.heads = slice(None) if tp is None else slice(dist.get_rank(tp), None, dist.get_world_size(tp))

    def forward(self, x: Tensor, packed: Any = None) -> Tensor:
        heads = (self.config.heads, self.config.head_dim)
        qr = self.q_a(x)
        shared = [item.unflatten(-1, heads)[:, :, self.heads] for item in (self.q_b(qr), self.k(x), self.v(x))]
        if packed is not None:
            shared, qr = [item.squeeze(1) for item in shared], qr.squeeze(1)
        found = self.core_attention(
            *shared, None, packed_seq_params=packed, attn_mask_type=AttnMaskType.causal, x=x, qr=qr
        )
        every = x.new_zeros(*found.shape[:2], *heads)
        every[:, :, self.heads] = found.unflatten(-1, (-1, self.config.head_dim))
        if self.tp is not None:
            total = every.detach().clone()
            dist.all_reduce(total, group=self.tp)
            every = every + (total - every).detach()  # gradients of a frozen body are nobody's concern
        return x + self.o(every.flatten(2))


class Model(nn.Module):
    def __init__(self, config: Any, tp: Any = None, cp: Any = None, layers: range | None = None) -> None:
        super().__init__()
        numbers = layers or range(1, config.num_layers + 1)
        self.layers = nn.ModuleList(Layer(config, number, tp, cp) for number in numbers)

    def forward(self, x: Tensor, packed: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, packed)
        return x


def configured(**changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "num_layers": 4,
            "hidden_size": 12,
            "q_lora_rank": 6,
            "heads": 4,
            "head_dim": 6,
            "dsa_indexer_n_heads": 3,
            "dsa_indexer_head_dim": 8,
            "dsa_indexer_topk": 4,
            "dsa_indexer_loss_coeff": 0.5,
            "recompute_granularity": None,
            "recompute_modules": None,
            **changes,
        }
    )
