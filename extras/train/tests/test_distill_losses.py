"""What distillation computes: the paper's losses, what learns from which, and the same model as transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from indexcache_search.hf.roles import apply_roles
from indexcache_train.distill.losses import divergence, multi_layer
from indexcache_train.distill.model import Distillation, set_trainable
from indexcache_train.distill.settings import Loss, Stage
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.transformers import attentions as dsa_attentions
from tests.conftest import LAYERS, VOCAB, tiny_config, tiny_model

STAGES: tuple[Stage, ...] = ("warmup", "sparse")
PATTERNS = st.text("FS", min_size=LAYERS - 1, max_size=LAYERS - 1).map(lambda rest: Pattern("F" + rest))


def averaged(targets: Sequence[Tensor], log_q: Tensor) -> Tensor:
    """Eq. 2: the divergence of the served layers' mean attention."""
    return divergence(torch.stack(list(targets)).mean(0), log_q)


class Watched(Distillation):
    """Keeps what each layer's attention does, and what its indexer says."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def _divergence(self, layer: int, p: Tensor) -> Tensor:
        self.seen[layer] = p, self._log_q[self.pattern.source_layers[layer]]
        return super()._divergence(layer, p)

    def segments(self) -> list[tuple[list[Tensor], Tensor]]:
        """For each indexer what the layers that it serves do, and what it says."""
        sources = self.pattern.source_layers
        served = [[layer for layer, own in enumerate(sources) if own == source] for source in self.pattern.full_layers]
        served = served if self.loss == "multi" else [layers[:1] for layers in served]
        return [([self.seen[layer][0] for layer in layers], self.seen[layers[0]][1]) for layers in served]


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(
    model: Any, pattern: Pattern, stage: Stage, loss: Loss = "multi", lm: float = 1.0, kernels: Any = None
) -> dict[str, Tensor]:
    """Gradients of both losses by parameter; `lm` weighs the language modelling loss."""
    distillation = Distillation(model, pattern, stage, loss, kernels)
    model.zero_grad()
    with distillation.attached():
        output = distillation(tokens())
        total = output.divergences.sum()
        if output.token_losses is not None:
            total = total + lm * output.token_losses.sum()
        total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_both_losses_have_the_same_gradient() -> None:
    """Proposition 1, on the losses themselves."""
    generator = torch.Generator().manual_seed(0)
    targets = [torch.rand(3, 5, 7, dtype=torch.float64, generator=generator).softmax(-1) for _ in range(4)]
    targets[0][..., -2:] = 0  # a key that one layer does not look at
    scores = torch.randn(3, 5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    found = [
        torch.autograd.grad(loss(targets, scores.log_softmax(-1)).sum(), scores)[0] for loss in (multi_layer, averaged)
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=6)
@given(pattern=PATTERNS, seed=st.integers(0, 1000))
def test_proposition_1_on_models(stage: Stage, pattern: Pattern, seed: int) -> None:
    """What trains (Eq. 1) has the gradient of Eq. 2."""
    model = tiny_model(tiny_config(first_k_dense_replace=LAYERS), seed).double()
    set_trainable(model, pattern, "warmup")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    distillation = Watched(model, pattern, stage)
    with distillation.attached():
        multi = distillation(tokens()).divergences.sum()
        average = torch.stack([averaged(*segment).sum() for segment in distillation.segments()]).sum()
        ours, theirs = (torch.autograd.grad(loss, parameters, retain_graph=True) for loss in (multi, average))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_the_loss_is_that_of_the_equation(config: dict[str, Any], stage: Stage) -> None:
    """What is summed up on the way through the layers against Eq. 1 over what all of them did."""
    model, pattern = tiny_model(config), Pattern("FSSFFS")
    for loss in ("multi", "own"):
        distillation = Watched(model, pattern, stage, loss)
        with distillation.attached(), torch.no_grad():
            found = distillation(tokens()).divergences
        for place, (targets, log_q) in enumerate(distillation.segments()):
            expected = multi_layer(targets, log_q) if loss == "multi" else divergence(targets[0], log_q)
            torch.testing.assert_close(found[place], expected.sum())
            assert all(item.sum(-1).allclose(torch.ones(())) for item in targets)


def test_in_the_warmup_only_the_indexers_of_full_layers_learn(config: dict[str, Any]) -> None:
    model, pattern = tiny_model(config), Pattern("FSSFSS")
    set_trainable(model, pattern, "warmup")
    found = gradients(model, pattern, "warmup")
    indexers = {f"model.layers.{layer}.self_attn.indexer." for layer in (0, 3)}
    assert {name[: name.index("indexer.") + 8] for name in found} == indexers
    assert all(gradient.abs().max() > 0 for gradient in found.values())


def test_in_the_sparse_stage_each_part_learns_from_its_own_loss(config: dict[str, Any]) -> None:
    model, pattern = tiny_model(config), Pattern("FSSFSS")
    set_trainable(model, pattern, "sparse")
    both, only = gradients(model, pattern, "sparse"), gradients(model, pattern, "sparse", lm=0.0)
    moved = {name for name, gradient in only.items() if gradient.any()}
    assert moved == {name for name in both if "indexer" in name}
    for name in moved:
        torch.testing.assert_close(both[name], only[name])
    body = {name for name, _ in model.named_parameters() if "indexer" not in name}
    assert body <= both.keys()
    for layer in (1, 2, 4, 5):
        assert not any(f"layers.{layer}.self_attn.indexer" in name for name in both)


def test_the_sparse_stage_runs_the_model_that_will_be_served(config: dict[str, Any]) -> None:
    model, pattern = tiny_model(config), Pattern("FSFSSS")
    with apply_roles(model, pattern), torch.no_grad():
        logits = model(tokens(), use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten(), reduction="none"
    )
    distillation = Distillation(model, pattern, "sparse")
    with distillation.attached(), torch.no_grad():
        found = distillation(tokens()).token_losses
    assert found is not None
    torch.testing.assert_close(found.flatten(), expected)
    with torch.no_grad():  # left as it was
        assert torch.equal(model(tokens(), use_cache=False).logits, model(tokens(), use_cache=False).logits)
    assert all(
        "forward" not in item.indexer.__dict__ and "indexer" not in item.__dict__ for item in dsa_attentions(model)
    )


@pytest.mark.parametrize("kernels", [None, "naive"])
def test_the_losses_of_the_dense_model(config: dict[str, Any], kernels: Any) -> None:
    """As of a model that selects everything."""
    model = tiny_model({**config, "index_topk": 64})
    logits = model(tokens(), use_cache=False).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.mT, tokens()[:, 1:], reduction="none")
    sparse = tiny_model(config)
    distillation = Distillation(sparse, Pattern("FSFSSS"), "warmup", "multi", kernels)
    distillation.measures_dense = True
    with distillation.attached(), torch.no_grad():
        found = distillation(tokens()).token_losses
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loss", ["multi", "own"])
def test_gradient_checkpointing_changes_nothing(config: dict[str, Any], stage: Stage, loss: Loss) -> None:
    model, pattern = tiny_model(config), Pattern("FSSFSS")
    set_trainable(model, pattern, stage)
    expected = gradients(model, pattern, stage, loss)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    found = gradients(model, pattern, stage, loss)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_layers_without_an_indexer_teach_their_source() -> None:
    config = tiny_config(indexer_types=["full", "shared", "full", "shared", "shared", "full"])
    model, pattern = tiny_model(config), Pattern("FSFSSF")
    set_trainable(model, pattern, "sparse")
    own, multi = (gradients(model, pattern, "sparse", loss) for loss in ("own", "multi"))
    name = "model.layers.2.self_attn.indexer.wq_b.weight"
    assert not torch.allclose(own[name], multi[name])
    last = "model.layers.5.self_attn.indexer.wq_b.weight"
    torch.testing.assert_close(own[last], multi[last])


def test_autocast_keeps_routers_in_float32(config: dict[str, Any]) -> None:
    model, pattern = tiny_model(config), Pattern("FSSFSS")
    seen = []
    gate = model.model.layers[2].mlp.gate
    gate.register_forward_hook(lambda *args: seen.append(args[2][0].dtype))
    distillation = Distillation(model, pattern, "sparse")
    with distillation.attached(), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        distillation(tokens())
    assert seen == [torch.float32]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loss", ["multi", "own"])
def test_the_kernels_compute_the_same(
    config: dict[str, Any], stage: Stage, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("indexcache_kernels.transformers", "indexcache_train.distill.kernel_attention"):
        monkeypatch.setattr(f"{module}.ROWS", 20)  # blocks that end within sequences
    model, pattern = tiny_model(config), Pattern("FSSFSS")
    set_trainable(model, pattern, stage)
    found = []
    for kernels in (None, "naive"):
        distillation = Distillation(model, pattern, stage, loss, kernels)  # type: ignore[arg-type]
        with distillation.attached(), torch.no_grad():
            output = distillation(tokens())
        found.append(output.divergences)
        if output.token_losses is not None:
            found.append(output.token_losses)
    half = len(found) // 2
    torch.testing.assert_close(found[half:], found[:half], rtol=2e-5, atol=2e-5)
    expected = gradients(model, pattern, stage, loss)
    for name, gradient in gradients(model, pattern, stage, loss, kernels="naive").items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-3 * expected[name].abs().max().item())


class Kept:
    def __init__(self, item: Tensor) -> None:
        self.item = item


def test_the_warm_up_keeps_nothing_of_a_block(config: dict[str, Any]) -> None:
    """Of what the divergences are computed from; after the forward pass, for the backward pass."""
    model, pattern, batch = tiny_model(config), Pattern("FSSFSS"), tokens(2, 25)
    set_trainable(model, pattern, "warmup")
    kept: WeakSet[Kept] = WeakSet()

    def keep(item: Tensor) -> Kept:
        holder = Kept(item)
        kept.add(holder)
        return holder

    distillation = Distillation(model, pattern, "warmup", kernels="naive")
    with distillation.attached(), torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.item):
        output = distillation(batch)
    assert output.divergences.requires_grad and len(kept) > 10
    assert all(holder.item.shape[-1:] != (batch.numel(),) for holder in kept)  # a row of scores


@pytest.mark.parametrize("stage", STAGES)
def test_the_kernels_with_checkpointing_and_autocast(config: dict[str, Any], stage: Stage) -> None:
    model, pattern = tiny_model(config), Pattern("FSSFSS")
    set_trainable(model, pattern, stage)
    expected = gradients(model, pattern, stage, kernels="naive")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for name, gradient in gradients(model, pattern, stage, kernels="naive").items():
        torch.testing.assert_close(gradient, expected[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = gradients(model, pattern, stage, kernels="naive")
    assert rounded.keys() == expected.keys() and all(gradient.isfinite().all() for gradient in rounded.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_on_a_gpu(config: dict[str, Any], stage: Stage, dtype: torch.dtype) -> None:
    """In bfloat16 the plain path's own rounding, through six layers and their selections, is the measure."""
    model, pattern = tiny_model({**config, "v_head_dim": 16}).cuda(), Pattern("FSSFSS")  # of flex attention the least
    set_trainable(model, pattern, stage)
    inputs = tokens(2, 200).cuda()

    def run(kernels: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        distillation = Distillation(model, pattern, stage, "multi", kernels)
        model.zero_grad()
        with distillation.attached(), torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            output = distillation(inputs)
            losses = output.divergences.sum()
            if output.token_losses is not None:
                losses = losses + output.token_losses.sum()
            losses.backward()
        return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}

    def error(found: dict[str, Tensor]) -> float:
        assert found.keys() == expected.keys()
        return sum(float((found[name] - g).norm() / g.norm()) for name, g in expected.items()) / len(expected)

    expected = run(None, torch.float32)
    limit = 5e-3 if dtype == torch.float32 else 1.2 * error(run(None, dtype))
    found = error(run("auto", dtype))
    print(f"{stage}, {dtype}: relative error {found:.2g}, limit {limit:.2g}")
    assert found < limit
