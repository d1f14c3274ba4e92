"""The gradients of sparse attention that are written for Hopper: when they are taken, and that they are right."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_train.kernels import attention_gradients, sparse_attention
from indexcache_train.kernels.attention_gradients import hopper
from tests.kernels.interpreter import DEVICE, INTERPRETED, poisoned
from tests.kernels.test_kernels import relative_rms

__all__ = ["poisoned"]  # a fixture of every test here
MODULE = "indexcache_train.kernels.attention_gradients.hopper_kernel"


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="no CUDA device")
@pytest.mark.parametrize(("heads", "topk"), [(64, 2048), (128, 2048), (24, 77), (16, 2048), (72, 77)])
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "shifted"])
def test_gradients_for_hopper_are_those_of_float64_and_triton(
    heads: int, topk: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "FEWER_HEADS", 0)
    generator = torch.Generator(DEVICE).manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()

    q, above = normal(24, heads, 576), normal(24, heads, 512)
    k = normal(3000, 1, 576) if aligned else normal(3000 * 576 + 3)[3:].view(3000, 1, 576)
    if not hopper.fits(q, k, 512):
        pytest.skip("needs a Hopper device and Triton 3.5 to 3.8")
    indices = torch.stack([torch.randperm(3000, device=DEVICE, generator=generator)[:topk] for _ in range(24)]).int()
    indices[0, topk // 3 :], indices[1], indices[2, ::3] = -1, -1, -1
    exact = [item.detach().double().requires_grad_() for item in (q, k)]
    for row in range(24):  # all at once take 100 GiB in float64
        truth, _ = sparse_attention(
            exact[0][row : row + 1], exact[1], 512, indices[row : row + 1], 0.05, backend="naive"
        )
        truth.backward(above[row : row + 1].double())
    expected = [leaf.grad for leaf in exact]
    found = {}
    for name, backend in (("hopper", "auto"), ("again", "auto"), ("triton", "triton")):
        leaves = [item.detach().requires_grad_() for item in (q, k)]
        out, _ = sparse_attention(*leaves, 512, indices, 0.05, backend=backend)  # type: ignore[arg-type]
        found[name] = torch.autograd.grad(out, leaves, above)
    for mine, other, exactly in zip(found["hopper"], found["triton"], expected, strict=True):
        assert relative_rms(mine, exactly) < 5e-3 and relative_rms(mine, other.double()) < 5e-3
    assert not found["hopper"][0][1].any() and torch.equal(found["hopper"][0], found["again"][0])


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16, is_cuda: bool = True) -> Any:
    """Make a stand-in for a tensor, with all that `fits` reads."""

    class Fake(SimpleNamespace):
        def __len__(self) -> int:
            return shape[0]

    return Fake(shape=shape, dtype=dtype, is_cuda=is_cuda, device="cuda:0")


Q, K = fake(4, 64, 576), fake(9, 1, 576)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(hopper, "_kernel", lambda: "a kernel")


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("heads", [33, 64, 96, 128])
def test_hopper_has_gradients_of_its_own(heads: int) -> None:
    assert hopper.fits(fake(4, heads, 576), K, 512)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        pytest.param(fake(4, 32, 576), K, 512, id="few heads"),
        pytest.param(fake(4, 64, 576, is_cuda=False), K, 512, id="a CPU"),
        pytest.param(fake(4, 64, 576, dtype=torch.float16), K, 512, id="float16"),
        pytest.param(fake(4, 64, 192), fake(9, 1, 192), 128, id="other dimensions"),
        pytest.param(Q, fake(9, 2, 576), 512, id="two key heads"),
        pytest.param(Q, K, fake(9, 1, 512), id="values apart from keys"),
        pytest.param(Q, fake(0, 1, 576), 512, id="no keys"),
    ],
)
def test_other_inputs_take_the_triton_kernel(q: Any, k: Any, v: Any) -> None:
    assert not hopper.fits(q, k, v)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 4), (10, 0), (12, 0)], ids=str)
def test_other_devices_take_the_triton_kernel(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert not hopper.fits(Q, K, 512)


@pytest.mark.usefixtures("on_hopper")
def test_amd_takes_the_triton_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")  # where an MI200 is of capability 9.0, too
    assert not hopper.fits(Q, K, 512)


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that sets Triton's release and asks for the kernel; the interpreter is off."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def kernel(version: str) -> Any:
        monkeypatch.setattr("triton.__version__", version)
        return hopper._kernel.__wrapped__()

    return kernel


def test_releases_that_were_tried_have_the_kernel(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(backward_kernel="a kernel"))
    assert [release(version) for version in ("3.5.0", "3.6.0", "3.8.1+git0")] == ["a kernel"] * 3


@pytest.mark.parametrize("version", ["3.4.0", "3.9.0", "4.0.0", "of mine"])
def test_other_releases_of_triton_take_the_triton_kernel(
    version: str, release: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(backward_kernel="a kernel"))
    assert release(version) is None


def test_without_gluon_the_triton_kernel_is_taken(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental", None)
    assert release("3.6.0") is None


def test_the_interpreter_takes_the_triton_kernel(release: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(backward_kernel="a kernel"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert release("3.6.0") is None


@pytest.mark.skipif(not INTERPRETED, reason="runs the Triton kernel in place of the other")
@pytest.mark.parametrize(("backend", "fits", "taken"), [("auto", True, 1), ("auto", False, 0), ("triton", True, 0)])
def test_gradients_are_taken_where_they_fit(
    backend: Any, fits: bool, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def gradients(q: Tensor, k: Tensor, indices: Tensor, lse: Tensor, delta: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        calls.append(delta)
        return torch.full_like(q, 2), torch.full_like(k, 3)

    for module in (attention_gradients, sys.modules["indexcache_kernels.sparse_attention"]):
        monkeypatch.setattr(module, "implementation", lambda *_: "triton")
    monkeypatch.setattr(hopper, "fits", lambda *_: fits)
    monkeypatch.setattr(hopper, "gradients", gradients)
    q, k = torch.randn(1, 2, 24).requires_grad_(), torch.randn(5, 1, 24).requires_grad_()
    out, _ = sparse_attention(q, k, 16, torch.tensor([[0, 3]], dtype=torch.int32), 0.2, backend)
    found = torch.autograd.grad(out.sum(), (q, k))
    assert len(calls) == taken and bool((found[0] == 2).all() and (found[1] == 3).all()) == bool(taken)
    assert all(torch.allclose(delta, out.sum(dim=2)) for delta in calls)


def test_sums_of_keys_get_back_the_order_of_dimensions() -> None:
    """A thread has dimensions 2c, 2c + 1, 8 + 2c and 9 + 2c of 16 side by side."""
    sums, d_k = torch.empty(3, 576), torch.empty(3, 1, 576, dtype=torch.bfloat16)
    expected = torch.randint(-99, 99, (3, 1, 576)).bfloat16()
    for dim in range(576):
        group, within = divmod(dim, 16)
        half, pair = divmod(within, 8)
        sums[:, 16 * group + 4 * (pair // 2) + 2 * half + pair % 2] = expected[:, 0, dim].float()
    hopper.restore(sums, d_k)
    assert torch.equal(d_k, expected)
