"""Indexers on a CPU that score no keys behind a block of queries: the selections of transformers, to the last index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from indexcache_search.hf import indexers
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.transformers import attentions
from tests.conftest import LAYERS, TOPK, VOCAB, tiny_config, tiny_model

QUERIES = 16
FULL = Pattern.full(LAYERS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexers, "QUERIES", QUERIES)


def tokens_of(length: int, rows: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))


def own_selections(model: Any, run: Callable[[], Any]) -> list[Tensor]:
    """What each layer's indexer itself selects while `run` runs the model."""
    found: list[Tensor] = []
    hooks = [item.indexer.register_forward_hook(lambda *args: found.append(args[-1])) for item in attentions(model)]
    with torch.inference_mode():
        run()
    for hook in hooks:
        hook.remove()
    return found


def selections(model: Any, run: Callable[[], Any]) -> list[Tensor]:
    found: list[Tensor] = []
    with torch.inference_mode(), apply_roles(model, FULL, lambda _, chosen: found.append(chosen)):
        run()
    return found


def never(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the whole scores were computed")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [TOPK - 2, QUERIES, QUERIES + 1, 3 * QUERIES - 7])
def test_selections_are_those_of_transformers(
    config: dict[str, Any], attention: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = tiny_model(config), tokens_of(length)
    model.set_attn_implementation(attention)
    expected = own_selections(model, lambda: model(input_ids=tokens, use_cache=False))
    assert len(expected) == LAYERS
    monkeypatch.setattr(type(attentions(model)[0].indexer), "forward", own_forward(model, never))
    found = selections(model, lambda: model(input_ids=tokens, use_cache=False))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {chosen.dtype for chosen in found} == {torch.int32}


def own_forward(model: Any, replacement: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`replacement` with the signature that transformers' indexer has."""
    replacement.__wrapped__ = type(attentions(model)[0].indexer).forward  # type: ignore[attr-defined]
    return replacement


@pytest.mark.parametrize("changes", [{"index_n_heads": 1}, {"index_head_dim": 12}], ids=["ties", "odd scale"])
def test_ties_go_where_transformers_has_them(changes: dict[str, int]) -> None:
    """One head gives many scores of exactly 0, more than there is room for; a scale of no power of two rounds."""
    model, tokens = tiny_model(tiny_config(**changes)), tokens_of(2 * QUERIES + 3)
    run = lambda: model(input_ids=tokens, use_cache=False)  # noqa: E731
    assert all(map(torch.equal, selections(model, run), own_selections(model, run)))


def test_in_bfloat16(config: dict[str, Any]) -> None:
    model, tokens = tiny_model(config).bfloat16(), tokens_of(2 * QUERIES + 3)
    run = lambda: model(input_ids=tokens, use_cache=False)  # noqa: E731
    assert all(map(torch.equal, selections(model, run), own_selections(model, run)))


def test_padding_before_a_sequence(config: dict[str, Any]) -> None:
    model, tokens = tiny_model(config), tokens_of(2 * QUERIES + 3)
    mask = torch.ones_like(tokens)
    mask[1, : QUERIES + 9] = 0
    run = lambda: model(input_ids=tokens, attention_mask=mask, use_cache=False)  # noqa: E731
    assert all(map(torch.equal, selections(model, run), own_selections(model, run)))


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_a_mask_that_shows_later_keys(config: dict[str, Any], kind: torch.dtype) -> None:
    model, length = tiny_model(config), 2 * QUERIES + 3
    model.set_attn_implementation("eager" if kind == torch.float32 else "sdpa")
    tokens, seen = tokens_of(length), torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    seen[1, 0, 2:QUERIES, length - 2 :] = True
    mask = seen if kind == torch.bool else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(kind).min)
    run = lambda: model(input_ids=tokens, attention_mask=mask, use_cache=False)  # noqa: E731
    found, expected = selections(model, run), own_selections(model, run)
    assert all(map(torch.equal, found, expected))
    assert (found[0][1, :QUERIES] >= length - 2).any()


def test_a_cache_is_used(config: dict[str, Any]) -> None:
    model, tokens, split = tiny_model(config), tokens_of(2 * QUERIES, 1), QUERIES + 5

    def run() -> None:
        cache = DynamicCache(config=model.config)
        model(input_ids=tokens[:, :split], past_key_values=cache, use_cache=True)
        model(input_ids=tokens[:, split:], past_key_values=cache, use_cache=True)

    found, expected = selections(model, run), own_selections(model, run)
    assert len(found) == 2 * LAYERS and all(map(torch.equal, found, expected))


def test_a_forward_set_by_somebody_else_runs(config: dict[str, Any]) -> None:
    model, ran = tiny_model(config), []
    indexer = attentions(model)[2].indexer
    original = indexer.forward
    indexer.forward = lambda *args, **kwargs: (ran.append(1), original(*args, **kwargs))[1]
    selections(model, lambda: model(input_ids=tokens_of(QUERIES + 1), use_cache=False))
    assert ran == [1]


def test_scores_of_later_keys_are_not_computed(config: dict[str, Any]) -> None:
    model, tokens = tiny_model(config), tokens_of(32 * QUERIES, 1)
    counts = []
    for run in (own_selections, selections):
        with FlopCounterMode(display=False) as counter:
            run(model, lambda: model(input_ids=tokens, use_cache=False))
        counts.append(counter.get_total_flops())
    length, indexer = tokens.shape[1], attentions(model)[0].indexer
    scores = LAYERS * 2 * length**2 * indexer.n_heads * (indexer.head_dim + 1)
    assert counts[0] - counts[1] == pytest.approx(scores * (1 - 1 / 32) / 2, rel=0.02)  # head weights come twice
