"""transformers' models on the kernels against themselves without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from indexcache_kernels import KernelInputError
from indexcache_kernels.transformers import use_kernels
from indexcache_search.hf.roles import apply_roles
from indexcache_train.kernels import sparse_attention
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.transformers import attentions as dsa_attentions
from tests.conftest import LAYERS, TOPK, VOCAB, tiny_config, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(sequences: int = 2, length: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (sequences, length), generator=generator).to(DEVICE)


def run(model: Any, selected: dict[int, Tensor] | None = None, **given: Any) -> Tensor:
    """Logits; `selected` gets the indices of each layer, sorted, those that a query does not see as -1."""

    def observe(layer: int, indices: Tensor) -> None:
        if selected is not None:
            seen = indices <= torch.arange(indices.shape[1], device=indices.device)[:, None]
            selected[layer] = indices.masked_fill(~seen, -1).sort(dim=-1).values

    with torch.inference_mode(), apply_roles(model, Pattern("FSFFSF"), observe):
        logits: Tensor = model(**given, use_cache=False).logits
    return logits


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_same_keys_and_logits(config: dict[str, Any], implementation: str) -> None:
    model = tiny_model(config).to(DEVICE)
    model.set_attn_implementation(implementation)
    plain: dict[int, Tensor] = {}
    kernels: dict[int, Tensor] = {}
    expected = run(model, plain, input_ids=tokens())
    with use_kernels(model):
        found = run(model, kernels, input_ids=tokens())
    assert plain.keys() == kernels.keys() and all(torch.equal(plain[layer], kernels[layer]) for layer in plain)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, expected)  # it did run
    assert torch.equal(run(model, input_ids=tokens()), expected)  # and is gone


def test_padding_on_either_side(config: dict[str, Any]) -> None:
    model, given = tiny_model(config).to(DEVICE), tokens(3)
    mask = torch.ones_like(given)
    mask[1, :9], mask[2, 30:] = 0, 0
    expected = run(model, input_ids=given, attention_mask=mask)
    with use_kernels(model):
        found = run(model, input_ids=given, attention_mask=mask)
    seen = mask.bool()
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-4, atol=1e-4)
    mask[1, 20] = 0
    with use_kernels(model), pytest.raises(KernelInputError, match="the attention mask has gaps"):
        run(model, input_ids=given, attention_mask=mask)


def test_a_cache_goes_on(config: dict[str, Any]) -> None:
    model, given = tiny_model(config).to(DEVICE), tokens(2)
    with use_kernels(model), torch.inference_mode():
        expected = model(given, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in given.split([25, 14, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients(config: dict[str, Any], checkpointing: bool) -> None:
    model, given = tiny_model(config).to(DEVICE).train(), tokens(2, 24)
    if checkpointing:
        model.gradient_checkpointing_enable()
    losses, gradients = [], []
    for kernels in (False, True):
        model.zero_grad()
        if kernels:
            with use_kernels(model, attend=sparse_attention):
                loss = model(given, labels=given, use_cache=False).loss
                loss.backward()
        else:
            loss = model(given, labels=given, use_cache=False).loss
            loss.backward()
        losses.append(loss.item())
        gradients.append({name: item.grad for name, item in model.named_parameters() if item.grad is not None})
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-5, msg=name)


def test_what_can_not_be_done_is_said() -> None:
    model, given = tiny_model(tiny_config()).to(DEVICE), tokens(1)
    with (
        apply_roles(model, Pattern("FSFFSF")),  # the kernels would run the indexers of S layers
        pytest.raises(RuntimeError, match="an indexer's forward is replaced already"),
        use_kernels(model),
    ):
        pass
    with use_kernels(model):
        with pytest.raises(RuntimeError, match="runs on the kernels already"), use_kernels(model):
            pass
        packed = torch.cat([torch.arange(20), torch.arange(20)])[None].to(DEVICE)
        with pytest.raises(KernelInputError, match="sequences are packed"):
            model(given, position_ids=packed, use_cache=False)
        ready = torch.ones(1, 1, 40, 40, dtype=torch.bool, device=DEVICE).tril()
        with pytest.raises(KernelInputError, match=r"the mask is a ready-made one of torch\.bool"):
            model(given, attention_mask=ready, use_cache=False)
    model.config.attention_dropout = 0.5
    for attention in dsa_attentions(model):
        attention.attention_dropout = 0.5
    with use_kernels(model), pytest.raises(KernelInputError, match=r"attention dropout is 0\.5"):
        model.train()(given, use_cache=False)
    model.config.model_type = "llama"
    with pytest.raises(KernelInputError, match="model_type is llama, expected one of"), use_kernels(model):
        pass
    assert len(dsa_attentions(model)) == LAYERS and TOPK < 40
