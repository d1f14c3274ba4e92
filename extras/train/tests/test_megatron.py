"""The loss of indexers in Megatron-Core's sparse attention, on a stand-in for it."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from extras.train.tests import megatron_stand_in as megatron
from indexcache_kernels.indexer_topk import causal_ranges, indexer_topk
from indexcache_kernels.indexer_topk.naive import indexer_scores
from indexcache_search.errors import NonFiniteLossError, SearchError
from indexcache_train.distill.adapters.megatron import IndexerLoss
from indexcache_train.distill.losses import multi_layer
from indexcache_train.distill.settings import Stage
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError
from tests.two_ranks import on_two_ranks

PATTERN, LENGTHS = Pattern("FSFS"), (6, 10)
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
STAGES: tuple[Stage, ...] = ("warmup", "sparse")
Gradients = dict[str, Tensor]


def model_of(**places: Any) -> Any:
    torch.manual_seed(0)
    return megatron.Model(megatron.configured(), **places).double().train()


def hidden(batch: int = 1, length: int = 16) -> Tensor:
    return torch.randn(length, batch, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def of(model: Any) -> Gradients:
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


def by_definition(model: Any, stage: Stage, sequences: list[Tensor]) -> Gradients:
    """Gradients of Equation 1, by `distill/losses.py`, and of the mean output; sequences are `[length, 1, hidden]`."""
    model.zero_grad()
    queries, coefficient = sum(len(x) for x in sequences), model.layers[0].config.dsa_indexer_loss_coeff
    for x in sequences:
        seen = torch.ones(len(x), len(x)).tril().bool()
        targets: dict[int, list[Tensor]] = {}
        log_q: dict[int, Tensor] = {}
        chosen: dict[int, Tensor] = {}
        for number, layer in enumerate(model.layers):
            source = PATTERN.source_layers[number]
            qr = layer.q_a(x)
            q, k, v = (item.view(len(x), 4, 6) for item in (layer.q_b(qr), layer.k(x), layer.v(x)))
            if number == source:
                vectors: list[Tensor] = []

                def keep(q: Tensor, weights: Tensor, k: Tensor, kept: list[Tensor] = vectors) -> Tensor:
                    kept.extend((q, k, weights))
                    return torch.zeros(1, len(q), len(q))

                indexer = layer.core_attention.indexer
                indexer._compute_index_scores = keep
                indexer.forward_with_scores(x.detach(), qr.detach())
                del indexer._compute_index_scores
                index = [item[:, 0] for item in vectors]
                chosen[number] = seen
                if stage == "sparse":
                    starts, ends = causal_ranges(torch.tensor([0, len(x)]))
                    indices = indexer_topk(*(i.detach().float() for i in index), starts=starts, ends=ends, topk=4)
                    marked = torch.zeros(len(x), len(x) + 1)
                    chosen[number] = marked.scatter(1, indices.long() % (len(x) + 1), 1.0)[:, :-1].bool()
                scores = indexer_scores(*index).masked_fill(~chosen[number], -torch.inf)
                log_q[number] = scores.log_softmax(-1)
            looks = torch.einsum("thd,lhd->htl", q, k) * 6**-0.5
            p = looks.masked_fill(~chosen[source], -torch.inf).softmax(-1)
            targets.setdefault(source, []).append(p.detach().mean(0))
            x = x + layer.o(torch.einsum("htl,lhd->thd", p, v).flatten(1))[:, None]
        loss = torch.stack([multi_layer(targets[source], log_q[source]).sum() for source in targets]).sum()
        total = coefficient * loss / queries + (x.square().sum() / queries if stage == "sparse" else 0)
        total.backward()
    return of(model)


def by_the_adapter(model: Any, stage: Stage, x: Tensor, packed: Any = None, **options: Any) -> Gradients:
    model.zero_grad()
    loss = IndexerLoss(model, PATTERN, stage, **options)
    x = x.clone().requires_grad_()  # as after embeddings, so that the warm-up reaches the attached losses
    with loss.attached():
        (model(x, packed).square().sum() / (len(x) * x.shape[1])).backward()
    return of(model)


def check_alike(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys() and any(".indexer." in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **EXACT)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["a batch", "packed"])
def test_gradients_are_those_of_the_definition(stage: Stage, kind: str) -> None:
    model = model_of()
    IndexerLoss(model, PATTERN, stage)  # what trains
    if kind == "packed":
        x = hidden()
        sequences = list(x.split(LENGTHS))
        packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, *LENGTHS]).cumsum(0).int(), cu_seqlens_q_padded=None)
    else:
        x, packed = hidden(batch=2, length=9), None
        sequences = [x[:, :1], x[:, 1:]]
    found = by_the_adapter(model, stage, x, packed)
    check_alike(found, by_definition(model, stage, sequences))
    trained = {name for name in found if ".indexer." in name}
    assert {name.split(".")[1] for name in trained} == {"0", "2"}


def chunks(x: Tensor, rank: int) -> Tensor:
    parts = x.chunk(4)
    return torch.cat([parts[rank], parts[3 - rank]])


def on_a_rank(rank: int) -> list[Gradients]:
    """Split over the context, then over heads; each rank's gradients, of its own queries or heads."""
    found: list[Gradients] = []
    for stage in STAGES:
        found.append(
            by_the_adapter(model_of(cp=dist.group.WORLD), stage, chunks(hidden(), rank), group=dist.group.WORLD)
        )
    found.append(by_the_adapter(model_of(tp=dist.group.WORLD), "warmup", hidden()))
    return found


def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    """Of a sequence in Megatron's chunks, as averaged over ranks; of heads, each rank has the whole of the indexers."""
    (*first, heads), (*second, other_heads) = on_two_ranks(on_a_rank, tmp_path)
    for stage, ours, theirs in zip(STAGES, first, second, strict=True):
        expected = by_the_adapter(model_of(), stage, hidden())
        check_alike({name: (ours[name] + theirs[name]) / 2 for name in ours}, expected)
    alone = model_of()
    IndexerLoss(alone, PATTERN, "warmup")
    expected = by_definition(alone, "warmup", [hidden()])
    for found in (heads, other_heads):
        check_alike(found, expected)


def test_the_loss_is_logged_and_scaled_as_megatron_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    expected = by_the_adapter(model, "warmup", hidden())
    saved = dict(megatron.DSAIndexerLossLoggingHelper.saved)
    assert saved.keys() == {1, 2, 3, 4} and all(value > 0 for value in saved.values())
    monkeypatch.setattr(megatron.DSAIndexerLossAutoScaler, "scale", 3.0)
    check_alike(by_the_adapter(model, "warmup", hidden()), {name: 3 * item for name, item in expected.items()})
    own = by_the_adapter(model, "warmup", hidden(), loss="own")
    assert any(not torch.allclose(own[name], 3 * expected[name]) for name in own)


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """What builds a model attaches the loss to it."""
    monkeypatch.setenv("PATTERN", PATTERN.roles)
    monkeypatch.setenv("STAGE", "warmup")
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "train_with_megatron.py"))
    model = example["with_indexer_loss"](model_of)()
    (model(hidden()).square().sum() / 16).backward()
    check_alike(of(model), by_the_adapter(model_of(), "warmup", hidden()))
    example["_ATTACHED"].close()
    assert all("forward" not in vars(layer.core_attention) for layer in model.layers)


def test_without_training_nothing_is_attached() -> None:
    model = model_of()
    megatron.DSAIndexerLossLoggingHelper.saved.clear()
    with IndexerLoss(model, PATTERN, "sparse").attached(), torch.no_grad():
        model(hidden())
    assert not megatron.DSAIndexerLossLoggingHelper.saved
    assert all("forward" not in vars(layer.core_attention) for layer in model.layers)


def test_a_loss_that_is_not_finite_ends_before_the_step() -> None:
    model = model_of()
    with torch.no_grad():
        model.layers[2].core_attention.indexer.linear_wk.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteLossError, match="layer 2: indexer loss nan, expected finite numbers"):
        by_the_adapter(model, "warmup", hidden())
    assert not of(model)


def test_models_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SearchError, match="the model has no DSAttention"):
        IndexerLoss(torch.nn.Linear(2, 2), PATTERN, "sparse")
    with pytest.raises(SearchError, match="layer 1 reuses the selection of layer 0, which is in another stage"):
        IndexerLoss(model_of(layers=range(2, 5)), PATTERN, "sparse")
    with pytest.raises(PatternError, match="has 3 letters"):
        IndexerLoss(model_of(), Pattern("FSS"), "sparse")
    for changes in (
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ):
        with pytest.raises(SearchError, match="so layers would run twice"):
            IndexerLoss(megatron.Model(megatron.configured(**changes)), PATTERN, "sparse")
    model = model_of()
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 16]), cu_seqlens_q_padded=None)
    with pytest.raises(SearchError, match="packed and split over ranks"):
        by_the_adapter(model, "sparse", hidden(), packed, group=object())
    with monkeypatch.context() as patch, pytest.raises(SearchError, match="has a bias or another mask than a causal"):
        patch.setattr(megatron, "AttnMaskType", SimpleNamespace(causal=megatron.AttnMaskType.padding))
        by_the_adapter(model, "sparse", hidden())
    monkeypatch.setattr(megatron.DSAIndexer, "_compute_index_scores", lambda self, q, k: None)
    with pytest.raises(SearchError, match="of Megatron-Core takes q, k; expected q, weights, k"):
        IndexerLoss(model_of(), PATTERN, "sparse")
    monkeypatch.delattr(megatron.DSAIndexer, "_compute_index_scores")
    with pytest.raises(SearchError, match="the indexer of Megatron-Core has no _compute_index_scores"):
        IndexerLoss(model_of(), PATTERN, "sparse")
