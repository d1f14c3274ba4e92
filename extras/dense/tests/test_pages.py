"""Page roles on transformers' dense models: theirs bit for bit with room for all, else what decoding computes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from indexcache_dense.family.layer_pages import budget_of
from indexcache_dense.hf import pages as pages_module
from indexcache_dense.hf.page_selector import PageSelector, token_max_scores
from indexcache_dense.hf.pages import apply_page_roles, attention_in_blocks
from indexcache_dense.kernels import CachedPages, page_scores, select_pages
from indexcache_dense.kernels.page_selection import naive
from indexcache_dense.selection import Selection
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.messages import BEGINS_SHARED, OTHER_LENGTH

LAYERS, LENGTH, PROMPT, VOCAB = 6, 70, 20, 96
FEW = Selection(page_tokens=4, pages=6, recent_pages=2, sink_pages=0, score="token_max")
ALL = replace(FEW, pages=LENGTH)
KINDS = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}


def dense_model(kind: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.3,
        **{"num_key_value_heads": 2, **KINDS[kind], **changes},
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def prompt_rows(rows: int = 2) -> Tensor:
    return (torch.arange(LENGTH) < PROMPT).expand(rows, LENGTH)


@torch.inference_mode()
def logits(model: Any, **batch: Tensor) -> Tensor:
    found: Tensor = model(use_cache=False, **batch).logits
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_that_covers_the_context_changes_no_bit(kind: str) -> None:
    model = dense_model(kind)
    untouched = logits(model, input_ids=tokens())
    with apply_page_roles(model, Pattern("DSSDSS", ALL)):
        assert torch.equal(logits(model, input_ids=tokens()), untouched)
    assert model.config._attn_implementation == "eager"
    with apply_page_roles(model, Pattern("DDDDDD", FEW)):
        assert torch.equal(logits(model, input_ids=tokens()), untouched)
    assert torch.equal(logits(model, input_ids=tokens()), untouched)


def test_only_rows_with_a_choice_differ() -> None:
    model = dense_model()
    untouched = logits(model, input_ids=tokens())
    with apply_page_roles(model, Pattern("DSSDSS", FEW)):
        differs = (logits(model, input_ids=tokens()) != untouched).any(-1).any(0)
    assert differs.nonzero()[0].item() == FEW.tokens  # the first token of one page more
    with apply_page_roles(model, Pattern("DSSDSS", FEW), prompt=(torch.arange(LENGTH) < 40).expand(2, LENGTH)):
        differs = (logits(model, input_ids=tokens()) != untouched).any(-1).any(0)
    assert differs.nonzero()[0].item() == 40


class Decoder:
    """Decoding with the kernels' page tables: the D layers' attention picks pages, the S layers read those alone."""

    def __init__(self, roles: str) -> None:
        self.roles, self.table, self.lengths = roles, torch.empty(0), torch.empty(0)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        length, groups = key.shape[2], query.shape[1] // key.shape[1]
        slots = torch.arange(length)
        if self.roles[module.layer_idx] == "S" and query.shape[2] == 1:
            slots = naive.slots_of(self.table[0], 1)[: int(self.lengths[0])]
        k, v = (item[0][:, slots].repeat_interleave(groups, 0) for item in (key, value))  # [H, L, D]
        seen = torch.ones(query.shape[2], len(slots), dtype=torch.bool).tril(len(slots) - query.shape[2])
        products = (query[0] @ k.mT * scaling).masked_fill(~seen, -torch.inf)
        if query.shape[2] == 1 and self.roles[module.layer_idx : module.layer_idx + 2] == "DS":
            table = torch.arange(-(-length // 4) * 4, dtype=torch.int32)[None]
            pages = CachedPages(table, torch.tensor([length], dtype=torch.int32))
            scores = page_scores(
                query[0].transpose(0, 1), key[0].transpose(0, 1).contiguous(), pages, lse=products.logsumexp(-1).mT,
                scale=scaling, budget=budget_of(FEW),
            )  # fmt: skip
            self.table, self.lengths = select_pages(scores, pages, budget=budget_of(FEW))
        return (products.softmax(-1) @ v).transpose(0, 1)[None], None


@pytest.mark.parametrize("roles", ["DSSDSS", "DDSSSS", "DSDSDS"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_pass_is_teacher_forced_decoding(roles: str, kind: str) -> None:
    """A prompt prefilled densely, then token by token with a cache and the selection kernels' definitions."""
    model = dense_model(kind)
    ids = tokens(1)
    with apply_page_roles(model, Pattern(roles, FEW), prompt=prompt_rows(1)):
        expected = logits(model, input_ids=ids)[0]
    AttentionInterface.register("test_decoder", Decoder(roles))
    AttentionMaskInterface.register("test_decoder", eager_mask)
    model.set_attn_implementation("test_decoder")
    cache, found = DynamicCache(config=model.config), []
    with torch.inference_mode():
        found.append(model(input_ids=ids[:, :PROMPT], past_key_values=cache).logits[0])
        found += [model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[0] for at in range(PROMPT, LENGTH)]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)


def test_what_is_chosen_is_the_kernels_choice() -> None:
    """Row by row, with sinks, against the definition for one request."""
    selection = Selection(page_tokens=8, pages=5, recent_pages=1, sink_pages=1, score="token_max")
    generator = torch.Generator().manual_seed(3)
    products = torch.randn(2, 4, LENGTH, LENGTH, generator=generator) * 3
    weights = products.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf).softmax(-1)
    kept = PageSelector(selection).choose(token_max_scores(weights, selection, 1), 0)
    for row in range(2):
        for at in range(LENGTH):
            shares = weights[row, :, at].amax(0)
            scores = torch.stack([part.sum() for part in shares.split(8)])
            pages = naive.selected(scores, at + 1, budget_of(selection))
            assert [int(page) for page in kept[row, at, : at // 8 + 1].nonzero()] == pages


def test_an_f_layer_attends_to_its_own_choice() -> None:
    """As a D layer that is followed by an S layer with the same weights, but for what the D layer itself attends to."""
    model, seen = dense_model(), {}
    with apply_page_roles(model, Pattern("DFSDFS", FEW), observe=seen.__setitem__):
        found = logits(model, input_ids=tokens())
    assert seen[1] is seen[2] and not torch.equal(seen[0], seen[1])
    with apply_page_roles(model, Pattern("DFSDFS", ALL)):
        assert torch.equal(logits(model, input_ids=tokens()), logits(dense_model(), input_ids=tokens()))
    with apply_page_roles(model, Pattern("DDSDDS", FEW)):
        assert not torch.equal(logits(model, input_ids=tokens()), found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("roles", ["DSSDSS", "DFSDSD"])
@pytest.mark.parametrize("prompts", ["none", "first", "between"])
def test_in_blocks_it_is_the_same(kind: str, roles: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the order of sums; blocks that don't divide the sequence, and sequences that begin in a cache."""
    monkeypatch.setattr(pages_module, "ROWS", 16)
    model, ids = dense_model(kind), tokens()
    prompt = {"none": None, "first": prompt_rows(), "between": torch.arange(LENGTH).expand(2, -1) // 20 % 2 == 0}[
        prompts
    ]
    seen: list[dict[int, Tensor]] = [{}, {}]
    found = []
    for number, around in enumerate((nullcontext, attention_in_blocks)):
        with around(), apply_page_roles(model, Pattern(roles, FEW), prompt, observe=seen[number].__setitem__):
            found.append(logits(model, input_ids=ids))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
    causal = torch.arange(seen[0][0].shape[2]) <= torch.arange(LENGTH)[:, None] // FEW.page_tokens
    assert all(torch.equal(seen[0][layer] & causal, seen[1][layer] & causal) for layer in range(LAYERS))
    past, begins = DynamicCache(), 33
    if prompts == "none":
        prompt = torch.zeros(2, LENGTH, dtype=torch.bool)
    assert prompt is not None
    for part in (slice(0, begins), slice(begins, None)):
        with (
            torch.inference_mode(),
            attention_in_blocks(),
            apply_page_roles(model, Pattern(roles, FEW), prompt[:, part]),
        ):
            end = model(input_ids=ids[:, part], past_key_values=past).logits
    torch.testing.assert_close(found[0][:, begins:], end, rtol=1e-4, atol=1e-4)


def test_observers_see_what_every_layer_chose_or_was_given() -> None:
    model, seen, watched = dense_model(), {}, {}

    def watch(layer: int, first: int, weights: Tensor) -> None:
        assert first == 0 and layer not in watched
        watched[layer] = weights

    with apply_page_roles(model, Pattern("DSSDSD", FEW), observe=seen.__setitem__, watch=watch):
        logits(model, input_ids=tokens())
    assert list(seen) == list(range(6)) and seen[0] is seen[1] is seen[2] and seen[3] is seen[4]
    assert not torch.equal(seen[2], seen[4])
    assert list(watched) == [0, 3, 5] and torch.allclose(watched[3].sum(-1), torch.ones(()))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("DSS", OTHER_LENGTH.format(3, 6)),
        ("SSSDSS", f"{BEGINS_SHARED}, but layer 0 has no earlier layer to share from; expected D"),
    ],
)
def test_roles_that_do_not_fit(roles: str, message: str) -> None:
    with pytest.raises(PatternError, match=message), apply_page_roles(dense_model(), Pattern(roles, FEW)):
        pass


def test_models_and_passes_that_do_not_fit() -> None:
    for other, message in (
        (dense_model("mistral", sliding_window=8), "sliding_window is 8, expected layers that see everything"),
    ):
        with pytest.raises(SearchError, match=message), apply_page_roles(other, Pattern("DSSDSS", FEW)):
            pass
    model = dense_model()
    again = apply_page_roles(model, Pattern("DSSDSS", FEW))
    with again, pytest.raises(RuntimeError, match="already applied"), apply_page_roles(model, Pattern("DSSDSS", FEW)):
        pass


@pytest.mark.parametrize("step", [LENGTH - PROMPT, 1, 7])
def test_the_end_of_a_sequence_behind_a_cache(step: int) -> None:
    """What was read without roles, then the rest with them: in one pass, token by token, or in parts."""
    model, ids, pattern = dense_model(), tokens(), Pattern("DSSDSS", FEW)
    with apply_page_roles(model, pattern, prompt=prompt_rows()):
        expected = logits(model, input_ids=ids)
    cache, found = DynamicCache(config=model.config), []
    with torch.inference_mode():
        model(input_ids=ids[:, :PROMPT], past_key_values=cache)
    with torch.inference_mode(), apply_page_roles(model, pattern):
        for start in range(PROMPT, LENGTH, step):
            found.append(model(input_ids=ids[:, start : start + step], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), expected[:, PROMPT:], rtol=1e-4, atol=1e-4)
