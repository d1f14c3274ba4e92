"""NOSA's eviction heads: what they compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from extras.dense.tests.test_pages import dense_model, logits
from extras.lab.tests.evicting import ALL, LENGTH, PLAN, heads_for
from indexcache_dense.hf.pages import apply_page_roles, attention_in_blocks
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from indexcache_lab.eviction.attention import attend_with_bias
from indexcache_lab.eviction.heads import BiasUse, EvictionHeads, attach
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def tokens() -> Tensor:
    return torch.randint(3, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("use", ["always", "training"])
def test_new_heads_change_nothing(use: str) -> None:
    model = dense_model()
    untouched = logits(model, input_ids=tokens())
    attach(model, EvictionHeads.like(model.config, use, 0))  # type: ignore[arg-type]
    with apply_page_roles(model, Pattern("FFDFFF", ALL)):
        assert torch.equal(logits(model, input_ids=tokens()), untouched)


def test_the_bias_is_equation_8() -> None:
    """Shares times exp(b), b = scale softplus(weight v) of all key heads' values; what is left out stays out."""
    heads, generator = EvictionHeads(2, 2, 8, "always"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        heads.scale.copy_(torch.tensor([[0.0, 0.0], [0.7, -0.4]]))
    query, key, value = (torch.randn(1, groups, 9, 8, generator=generator) for groups in (4, 2, 2))
    seen = torch.ones(9, 9).tril().bool() & (torch.arange(9) != 3)
    mask = torch.zeros(1, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor]:
        products = query @ key.repeat_interleave(2, 1).mT * 0.3 + mask
        return ((products.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2),)

    vectors = value[0].transpose(0, 1).flatten(1)  # [keys, 16]
    bias = torch.tensor([0.7, -0.4])[:, None] * torch.nn.functional.softplus(heads.weight[1] @ vectors.T)
    assert torch.allclose(heads(1, value)[0], bias)
    weights = (query @ key.repeat_interleave(2, 1).mT * 0.3).exp() * bias.repeat_interleave(2, 0).exp()[None, :, None]
    weights = weights * seen
    expected = (weights / weights.sum(-1, keepdim=True)) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(heads.attend(1, attend, query, key, value, mask, 0.3), expected.transpose(1, 2))

    found = {}
    for use in ("always", "training"):
        heads.use, query.grad = use, None  # type: ignore[assignment]
        heads.zero_grad()
        out = heads.attend(1, attend, query.requires_grad_(), key, value, mask, 0.3)
        (out * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
        found[use] = out.detach(), heads.scale.grad.clone(), heads.weight.grad.clone()  # type: ignore[union-attr]
    assert torch.allclose(found["training"][0], attend(query, key, value, mask)[0], atol=1e-6)
    assert not torch.allclose(found["training"][0], found["always"][0], atol=1e-3)
    for plain, biased in zip(found["training"][1:], found["always"][1:], strict=True):
        assert torch.equal(plain, biased) and bool(plain[1].any()) and not bool(plain[0].any())
    with torch.no_grad():
        heads.use = "training"
        assert torch.equal(heads.attend(1, attend, query, key, value, mask, 0.3), attend(query, key, value, mask)[0])


@pytest.mark.parametrize("rows", [1, 4])
def test_fused_attention_is_eager_attention_with_its_gradients(rows: int) -> None:
    """One choice for all heads, or one for each; as precise for a bias that bfloat16 would round."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, groups, 24, 16, generator=generator) for groups in (4, 2, 2))
    bias = torch.randn(2, 2, 24, generator=generator) * 3 + 5
    direction = torch.randn(2, 24, 4, 16, generator=generator)
    seen = torch.rand(2, rows, 24, 24, generator=generator).lt(0.6).tril() | torch.eye(24).bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)

    def eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        added = mask + bias.repeat_interleave(2, 1)[:, :, None]
        products = query @ key.repeat_interleave(2, 1).mT * 0.3 + added.clamp_min(torch.finfo(torch.float32).min)
        return (products.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)

    def fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return attend_with_bias(query, key, value, mask, bias, scaling=0.3)

    found = []
    for attend in (eager, fused):
        given = [item.clone().requires_grad_() for item in (query, key, value, bias)]
        out = attend(*given)
        (out * direction).sum().backward()
        found.append([out, *(item.grad for item in given)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

    exact = eager(*(item.bfloat16().float() for item in (query, key, value)), bias)
    half = attend_with_bias(*(item.bfloat16() for item in (query, key, value)), mask.bfloat16(), bias, scaling=0.3)
    rounded = eager(*(item.bfloat16().float() for item in (query, key, value)), bias.bfloat16().float())
    assert (half.float() - exact).abs().mean() < (rounded - exact).abs().mean()


@pytest.mark.parametrize("use", ["always", "training"])
@pytest.mark.parametrize("detach", [False, True])
def test_values_get_a_gradient_through_the_bias(use: BiasUse, detach: bool) -> None:
    """That of equation 8, also written for a value's two places: what is added up, and what the bias is made of."""
    generator = torch.Generator().manual_seed(3)
    heads = EvictionHeads(1, 2, 4, use, detach=detach)
    with torch.no_grad():
        heads.scale.copy_(torch.tensor([[0.9, -0.6]]))
    query, key, value = (torch.randn(1, groups, 7, 4, generator=generator) for groups in (4, 2, 2))
    direction = torch.randn(1, 7, 4, 4, generator=generator)
    mask = torch.zeros(1, 1, 7, 7)

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor]:
        products = query @ key.repeat_interleave(2, 1).mT * 0.5 + mask
        return ((products.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2),)

    mine = value.clone().requires_grad_()
    (heads.attend(0, attend, query, key, mine, mask, 0.5) * direction).sum().backward()
    added, judged = (value.double().requires_grad_() for _ in range(2))
    vectors = judged[0].transpose(0, 1).flatten(1)
    bias = heads.scale[0].double()[:, None] * F.softplus(heads.weight[0].double() @ vectors.T)
    weights = (
        query.double() @ key.double().repeat_interleave(2, 1).mT * 0.5 + bias.repeat_interleave(2, 0)[:, None]
    ).exp()
    out = weights / weights.sum(-1, keepdim=True) @ added.repeat_interleave(2, 1)
    (out.transpose(1, 2) * direction).sum().backward()
    assert added.grad is not None and judged.grad is not None and judged.grad.abs().max() > 0.05
    expected = added.grad if detach else added.grad + judged.grad
    torch.testing.assert_close(mine.grad, expected.float(), rtol=1e-4, atol=1e-5)


def test_heads_choose_what_no_query_changes() -> None:
    """Of four pages two are open: one by the query, the other by the heads, who say the same to all queries."""
    model, seen = dense_model(), {}
    heads = heads_for(model)
    attach(model, heads)
    values: list[Tensor] = []
    hook = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out))
    with apply_page_roles(model, Pattern("FFFFFF", PLAN), observe=seen.__setitem__):
        logits(model, input_ids=tokens())
    hook.remove()
    value = values[0].view(2, LENGTH, 2, 16).transpose(1, 2)
    with torch.no_grad():
        total = heads(0, value).sum(1)[:, :192].view(2, 6, 32).mean(2)  # [batch, whole pages]
    for row in range(2):
        for position in range(160, LENGTH):
            number = position // 32 - 1  # of open pages
            open_ = seen[0][row, position, :number].nonzero()[:, 0].tolist()
            assert len(open_) == 2 and int(total[row, :number].argmax()) in open_


def test_models_without_heads_are_told(tmp_path: Path) -> None:
    model = dense_model()
    with (
        pytest.raises(SearchError, match="the plan asks for trained heads, and the model has none"),
        apply_page_roles(model, Pattern("FFFFFF", PLAN)),
    ):
        pass
    heads = heads_for(model, "training")
    attach(model, heads)
    with (
        pytest.raises(SearchError, match="trained heads are not known to attention in blocks"),
        attention_in_blocks(),
        apply_page_roles(model, Pattern("FFFFFF", PLAN)),
    ):
        pass
    heads.save(tmp_path / "heads.safetensors")
    loaded = EvictionHeads.load(tmp_path / "heads.safetensors", model.config)
    assert loaded.use == "training" and torch.equal(loaded.scale, heads.scale)
    assert torch.equal(loaded.weight, heads.weight)
    tensors = load_file(tmp_path / "heads.safetensors")
    for name, changed, message in (
        ("short", {"scale": tensors["scale"]}, "expected eviction heads"),
        ("nan", {**tensors, "scale": tensors["scale"] * torch.nan}, "a weight is not finite"),
        ("other", {**tensors, "scale": tensors["scale"][:2]}, "expected eviction heads"),
    ):
        save_file(changed, tmp_path / name, metadata={"use": "always"})
        with pytest.raises(SearchError, match=message):
            EvictionHeads.load(tmp_path / name, model.config)
    (tmp_path / "garbage").write_bytes(b"no tensors")
    with pytest.raises(SearchError, match="can't be read"):
        EvictionHeads.load(tmp_path / "garbage", model.config)


def test_steps_with_heads() -> None:
    steps = ReusePolicy.parse("nosa:8:heads")
    assert str(steps) == "nosa:8:heads" and steps != ReusePolicy.parse("nosa:8")
    assert Selection.parse(str(PLAN)) == PLAN
    for text in ("ema:0.9:heads", "nosa:8:norms", "nosa:8:", "none:heads"):
        with pytest.raises(PatternError, match="steps"):
            ReusePolicy.parse(text)


# -- how they train
