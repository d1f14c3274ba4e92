"""The bench's call of cuDNN's backward, without cuDNN: a stand-in that has its arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_kernels import sparse_attention
from scripts.bench.kernels import cudnn_dsa


@pytest.fixture(autouse=True)
def looked_up_again() -> Iterator[None]:
    cudnn_dsa._backward.cache_clear()
    yield
    cudnn_dsa._backward.cache_clear()


def test_where_cudnn_is_not_installed_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    line = cudnn_dsa.refusal()
    assert line and "not installed" in line and "expected nvidia-cudnn-frontend" in line and "\n" not in line


def test_cudnn_gets_its_own_layout_and_its_gradients_come_back_in_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 4, 576, generator=generator), torch.randn(20, 1, 576, generator=generator)
    d_out = torch.randn(3, 4, 512, generator=generator)
    indices = torch.stack([torch.randperm(20, generator=generator)[:7] for _ in range(3)]).int()
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    out, lse = sparse_attention(*leaves, 512, indices, 0.04, backend="naive")
    expected = torch.autograd.grad(out, leaves, d_out)

    def backward(q: Tensor, kv: Tensor, out: Tensor, dout: Tensor, lse: Tensor, attn_sink: Tensor, topk_idxs: Tensor,
                 softmax_scale: float) -> dict[str, Any]:  # fmt: skip
        """Write down the gradients; a sink of -inf adds nothing to the denominator."""
        keys = kv[topk_idxs.long()]
        products = torch.einsum("thd,tkd->thk", q, keys) * softmax_scale
        weights = (products - torch.logaddexp(lse, attn_sink)[:, :, None]).exp()
        above = torch.einsum("thv,tkv->thk", dout, keys[..., :512])
        d_scores = softmax_scale * weights * (above - (out * dout).sum(2)[:, :, None])
        d_keys = torch.einsum("thk,thd->tkd", d_scores, q)
        d_keys[..., :512] += torch.einsum("thk,thv->tkv", weights, dout)
        d_kv = torch.zeros_like(kv).index_add(0, topk_idxs.flatten(), d_keys.flatten(0, 1))
        return {"dq": torch.einsum("thk,tkd->thd", d_scores, keys), "dkv": d_kv}

    module: Any = ModuleType("cudnn.deepseek_sparse_attention")
    module.sparse_attention_backward_wrapper = backward
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(__path__=[]))  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "cudnn.deepseek_sparse_attention", module)
    assert cudnn_dsa.refusal() is None
    found = cudnn_dsa.gradients(q, k, indices, out.detach(), lse, d_out, 0.04)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
