"""Page roles on transformers' dense models: theirs bit for bit with room for all, else what decoding computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from indexcache_kernels import PageBudget, page_scores, select_pages
from indexcache_kernels.page_selection import naive
from indexcache_search.errors import SearchError
from indexcache_search.hf.pages import apply_page_roles, chosen_keys

LAYERS, LENGTH, PROMPT, VOCAB = 6, 70, 20, 96
BUDGET = PageBudget(page_tokens=4, pages=6, recent_pages=2)
EVERYTHING = PageBudget(page_tokens=4, pages=LENGTH, recent_pages=2)
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
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        **{**KINDS[kind], **changes},
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
    with apply_page_roles(model, "DSSDSS", EVERYTHING):
        assert torch.equal(logits(model, input_ids=tokens()), untouched)
    assert model.config._attn_implementation == "eager"
    with apply_page_roles(model, "DDDDDD", BUDGET):
        assert torch.equal(logits(model, input_ids=tokens()), untouched)
    assert torch.equal(logits(model, input_ids=tokens()), untouched)


def test_only_rows_with_a_choice_differ() -> None:
    model = dense_model()
    untouched = logits(model, input_ids=tokens())
    with apply_page_roles(model, "DSSDSS", BUDGET):
        differs = (logits(model, input_ids=tokens()) != untouched).any(-1).any(0)
    assert differs.nonzero()[0].item() == BUDGET.pages * BUDGET.page_tokens  # the first token of one page more
    with apply_page_roles(model, "DSSDSS", BUDGET, dense=(torch.arange(LENGTH) < 40).expand(2, LENGTH)):
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
            given = {
                "table": torch.arange(-(-length // 4) * 4, dtype=torch.int32)[None],
                "lengths": torch.tensor([length], dtype=torch.int32),
            }
            scores = page_scores(
                query[0].transpose(0, 1), key[0].transpose(0, 1).contiguous(), lse=products.logsumexp(-1).mT,
                scale=scaling, budget=BUDGET, **given,
            )  # fmt: skip
            self.table, self.lengths = select_pages(scores, budget=BUDGET, **given)
        return (products.softmax(-1) @ v).transpose(0, 1)[None], None


@pytest.mark.parametrize("roles", ["DSSDSS", "DDSSSS", "DSDSDS"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_pass_is_teacher_forced_decoding(roles: str, kind: str) -> None:
    """A prompt prefilled densely, then token by token with a cache and the selection kernels' definitions."""
    model = dense_model(kind)
    ids = tokens(1)
    with apply_page_roles(model, roles, BUDGET, dense=prompt_rows(1)):
        expected = logits(model, input_ids=ids)[0]
    AttentionInterface.register("test_decoder", Decoder(roles))
    AttentionMaskInterface.register("test_decoder", eager_mask)
    model.set_attn_implementation("test_decoder")
    cache, found = DynamicCache(config=model.config), []
    with torch.inference_mode():
        found.append(model(input_ids=ids[:, :PROMPT], past_key_values=cache).logits[0])
        found += [model(input_ids=ids[:, at : at + 1], past_key_values=cache).logits[0] for at in range(PROMPT, LENGTH)]
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)


def test_padding_moves_the_pages() -> None:
    model, padding = dense_model(), [0, 9]
    ids = tokens(1)
    with apply_page_roles(model, "DSSDSS", BUDGET):
        expected = logits(model, input_ids=ids[:, : LENGTH - 9])[0]
    batch, mask = torch.zeros(2, LENGTH, dtype=torch.long), torch.ones(2, LENGTH, dtype=torch.long)
    batch[0], batch[1, 9:], mask[1, :9] = ids[0], ids[0, : LENGTH - 9], 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with apply_page_roles(model, "DSSDSS", BUDGET, starts=torch.tensor(padding)):
        found = logits(model, input_ids=batch, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(found[1, 9:], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0, : LENGTH - 9], expected, rtol=1e-4, atol=1e-5)


def test_what_s_layers_look_at_is_the_kernels_choice() -> None:
    """Row by row, with sinks, against the definition for one request."""
    budget = PageBudget(page_tokens=8, pages=5, recent_pages=1, sink_pages=1)
    generator = torch.Generator().manual_seed(3)
    products = torch.randn(2, 4, LENGTH, LENGTH, generator=generator) * 3
    weights = products.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf).softmax(-1)
    kept = chosen_keys(weights, budget)
    for row in range(2):
        for at in range(LENGTH):
            shares = weights[row, :, at].amax(0)
            scores = torch.stack([part.sum() for part in shares.split(8)])
            pages = naive.selected(scores, at + 1, budget)
            assert {int(key) // 8 for key in kept[row, at, : at + 1].nonzero()} == set(pages)


def test_observers_see_s_layers() -> None:
    model, seen = dense_model(), {}
    with apply_page_roles(model, "DSSDSS", BUDGET, observe=seen.__setitem__):
        logits(model, input_ids=tokens())
    assert list(seen) == [1, 2, 4, 5] and seen[1] is seen[2] and not torch.equal(seen[2], seen[4])


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("DSS", "pattern has 3 letters, model has 6 layers"),
        ("DSFDSS", "pattern has 'F' for layer 2, expected D or S"),
        ("SSSDSS", "pattern begins with S, but layer 0 has no earlier layer to share from; expected D"),
    ],
)
def test_roles_that_do_not_fit(roles: str, message: str) -> None:
    with pytest.raises(SearchError, match=message), apply_page_roles(dense_model(), roles, BUDGET):
        pass


def test_models_and_passes_that_do_not_fit() -> None:
    for other, message in (
        (dense_model("mistral", sliding_window=8), "sliding_window is 8, expected layers that see everything"),
        (torch.nn.Linear(2, 2), "Linear takes no page roles, expected LlamaForCausalLM"),
    ):
        with pytest.raises(SearchError, match=message), apply_page_roles(other, "DSSDSS", BUDGET):
            pass
    model = dense_model()
    with apply_page_roles(model, "DSSDSS", BUDGET):
        with pytest.raises(SearchError, match="already applied"), apply_page_roles(model, "DSSDSS", BUDGET):
            pass
        cache = DynamicCache(config=model.config)
        model(input_ids=tokens()[:, :4], past_key_values=cache)
        with pytest.raises(SearchError, match="run on whole sequences, without a cache"):
            model(input_ids=tokens()[:, 4:8], past_key_values=cache)
