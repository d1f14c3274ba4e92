"""Run-time roles: bit-identical to models built so, and leaving no trace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.override import indexer_types
from sglang_indexcache.families.dsa.transformers import attentions as dsa_attentions
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.messages import OTHER_LENGTH
from tests.conftest import LAYERS, TOPK, VOCAB, tiny_config, tiny_model

SEQ_LEN = 40


def random_patterns(count: int, seed: int = 0) -> list[Pattern]:
    draw = random.Random(seed)
    return [Pattern("F" + "".join(draw.choice("FS") for _ in range(LAYERS - 1))) for _ in range(count)]


def padded_batch() -> dict[str, torch.Tensor]:
    """Three sequences of different lengths, padded on the left, as for generation."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCAB, (3, SEQ_LEN), generator=generator)
    mask = torch.ones_like(tokens)
    for row, padding in enumerate((0, 5, 17)):
        tokens[row, :padding], mask[row, :padding] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


@torch.inference_mode()
def logits(model: Any, **batch: torch.Tensor) -> torch.Tensor:
    return model(**batch, use_cache=False).logits


def test_all_full_is_the_untouched_model(config: dict[str, Any]) -> None:
    model, batch = tiny_model(config), padded_batch()
    untouched = logits(model, **batch)
    with apply_roles(model, Pattern.full(LAYERS)):
        assert torch.equal(logits(model, **batch), untouched)


@pytest.mark.parametrize("pattern", random_patterns(6), ids=str)
def test_roles_equal_a_model_built_with_the_same_indexer_types(pattern: Pattern) -> None:
    config = tiny_config()
    full = tiny_model(config)
    built = tiny_model({**config, "indexer_types": indexer_types(pattern)})
    weights = {name: value for name, value in full.state_dict().items() if name in built.state_dict()}
    built.load_state_dict(weights)
    batch = padded_batch()
    expected = logits(built, **batch)
    if pattern.shared_layers:
        assert not torch.equal(logits(full, **batch), expected)  # the pattern matters on this input
    with apply_roles(full, pattern):
        assert torch.equal(logits(full, **batch), expected)


@pytest.mark.parametrize("pattern", random_patterns(4, seed=1), ids=str)
def test_deepseek_shares_exactly_the_source_layers_indices(pattern: Pattern) -> None:
    """DeepSeek-V3.2 has no sharing in transformers: the reference hands each layer its source's indices."""
    model, batch = tiny_model(tiny_config("deepseek_v32")), padded_batch()
    seen: dict[int, torch.Tensor] = {}
    with apply_roles(model, pattern, seen.__setitem__):
        shared = logits(model, **batch)
    assert all(seen[layer] is seen[source] for layer, source in enumerate(pattern.source_layers))
    indexers = [attention.indexer for attention in dsa_attentions(model)]
    for layer, source in enumerate(pattern.source_layers):
        indexers[layer].forward = lambda *_, _indices=seen[source], **__: _indices
    assert torch.equal(logits(model, **batch), shared)


def test_shared_layers_do_not_run_their_indexer(config: dict[str, Any]) -> None:
    model, pattern = tiny_model(config), Pattern("FSSFSF")
    ran: list[int] = []
    for layer, attention in enumerate(dsa_attentions(model)):
        attention.indexer.wk.register_forward_hook(lambda *_, _layer=layer: ran.append(_layer))
    with apply_roles(model, pattern):
        logits(model, **padded_batch())
    assert ran == list(pattern.full_layers)


def test_the_model_is_left_as_it_was(config: dict[str, Any]) -> None:
    model, batch = tiny_model(config), padded_batch()
    before = logits(model, **batch)
    attributes = [dict(attention.indexer.__dict__) for attention in dsa_attentions(model)]
    with pytest.raises(KeyboardInterrupt), apply_roles(model, Pattern("FSSSSS")):
        assert not torch.equal(logits(model, **batch), before)
        raise KeyboardInterrupt
    assert [dict(attention.indexer.__dict__) for attention in dsa_attentions(model)] == attributes
    assert torch.equal(logits(model, **batch), before)


def test_a_forward_set_by_somebody_else_survives(config: dict[str, Any]) -> None:
    """accelerate, for one, replaces `forward` on the instance."""
    model = tiny_model(config)
    indexer = dsa_attentions(model)[2].indexer
    original = indexer.forward
    indexer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    theirs = indexer.forward
    with apply_roles(model, Pattern("FFSFFF")):
        pass
    assert indexer.forward is theirs


def test_roles_do_not_nest(config: dict[str, Any]) -> None:
    model = tiny_model(config)
    with (
        apply_roles(model, Pattern("FSSFSF")),
        pytest.raises(RuntimeError, match="already applied"),
        apply_roles(model, Pattern.full(LAYERS)),
    ):
        pass
    assert "forward" not in dsa_attentions(model)[0].indexer.__dict__


def test_a_layer_without_indexer_cannot_be_full() -> None:
    model = tiny_model(tiny_config(indexer_types=indexer_types(Pattern("FFSFSF"))))
    with pytest.raises(PatternError, match="F for layer 2"), apply_roles(model, Pattern.full(LAYERS)):
        pass
    with pytest.raises(PatternError, match=OTHER_LENGTH.format(5, 6)), apply_roles(model, Pattern("FFSFS")):
        pass


def test_native_sharing_goes_on_below_run_time_roles() -> None:
    """Layer 4 is shared in the checkpoint; with layer 3 flipped too, both use layer 1's indices."""
    native = Pattern("FFFFSF")
    model = tiny_model(tiny_config(indexer_types=indexer_types(native)))
    target = Pattern("FFSSSF")
    built = tiny_model(tiny_config(indexer_types=indexer_types(target)))
    names = built.state_dict().keys()
    built.load_state_dict({name: value for name, value in model.state_dict().items() if name in names})
    batch = padded_batch()
    with apply_roles(model, target):
        assert torch.equal(logits(model, **batch), logits(built, **batch))


def test_generation_with_a_cache_equals_recomputing(config: dict[str, Any]) -> None:
    """Prefill and decode with a KV cache see the same sharing as one long forward."""
    model = tiny_model(config)
    tokens = padded_batch()["input_ids"][:1]
    with apply_roles(model, Pattern("FSFSSF")), torch.inference_mode():
        generated = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=VOCAB + 1)
        again = logits(model, input_ids=generated[:, :-1])[0, SEQ_LEN - 1 :].argmax(-1)
    assert generated.shape[1] == SEQ_LEN + 6
    assert again.tolist() == generated[0, SEQ_LEN:].tolist()


def test_patterns_agree_up_to_index_topk_tokens(config: dict[str, Any]) -> None:
    """Queries that see at most k tokens select all of them: why calibration refuses short sequences."""
    model = tiny_model(config)
    tokens = padded_batch()["input_ids"]
    expected = logits(model, input_ids=tokens)
    with apply_roles(model, Pattern("FSSSSS")):
        shared = logits(model, input_ids=tokens)
    torch.testing.assert_close(shared[:, :TOPK], expected[:, :TOPK], rtol=0, atol=1e-5)
    assert (shared[:, TOPK:] - expected[:, TOPK:]).abs().max() > 1e-3
