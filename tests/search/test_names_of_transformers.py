"""What transformers renames from version to version: both names work, and an unknown one is refused, never ignored."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention, GlmMoeDsaIndexer

from indexcache_kernels import KernelInputError
from indexcache_kernels import transformers as on_transformers
from indexcache_kernels.indexer_forward import CACHE_NAMES
from indexcache_kernels.transformers import key_ranges, use_kernels
from indexcache_search.engines.measurements import output_similarity
from indexcache_search.errors import SearchError
from indexcache_search.hf.cache_argument import cache_argument
from indexcache_search.hf.device import resolve_attention
from indexcache_search.hf.indexers import in_blocks
from indexcache_search.hf.roles import apply_roles
from indexcache_train.distill.model import Distillation
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe
from tests.conftest import VOCAB, tiny_config, tiny_model

TOKENS = torch.randint(3, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))
PROMPT = torch.ones(1, 24, dtype=torch.bool)


def test_the_bounds_say_what_was_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lowest, newest = on_transformers.TESTED.split(" to ")
    major, minor = newest.split(".")
    expected = f"transformers>={lowest},<{major}.{int(minor) + 1}"
    assert expected in project["optional-dependencies"]["search"]


def not_called(*_: Any) -> Tensor:
    raise AssertionError("the guard did not fire")


@pytest.mark.parametrize("name", [*CACHE_NAMES, None], ids=["cache", "past_key_values", "by position"])
def test_a_cache_is_seen_by_any_of_its_names(name: str | None) -> None:
    indexer = tiny_model(tiny_config()).model.layers[2].self_attn.indexer
    forward = in_blocks(indexer, not_called, 2, PROMPT)
    inputs, cache = [TOKENS] * 5, DynamicCache()
    given: dict[str, Any] = {} if name is None else {name: cache}
    with pytest.raises(SearchError, match="expected no key/value cache"):
        forward(*inputs, *([] if given else [cache]), **given)
    with pytest.raises(TypeError, match="kv"):
        forward(*inputs, kv=cache)


def test_the_kernels_take_a_cache_by_any_of_its_names() -> None:
    model = tiny_model(tiny_config())
    indexer, lengths = model.model.layers[2].self_attn.indexer, []

    class Held:
        def update_indexer(self, k: Tensor, layer: int) -> Tensor:
            lengths.append((k.shape[1], layer))
            return k

    hidden = torch.randn(1, 24, model.config.hidden_size)
    residual = torch.randn(1, 24, model.config.q_lora_rank)
    angles = model.model.rotary_emb(hidden, torch.arange(24)[None])
    with use_kernels(model, "naive"):
        for given in ({name: Held()} for name in CACHE_NAMES):
            indexer(hidden, residual, angles, key_ranges(1, 24, 24)[:, 0], None, **given)
    assert lengths == [(24, 2)] * 2


def test_models_are_given_their_cache_by_their_own_name() -> None:
    class New(nn.Module):
        def forward(self, input_ids: Tensor, cache: Any = None, **kwargs: Any) -> None: ...

    class Old(nn.Module):
        def forward(self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> None: ...

    class Other(nn.Module):
        def forward(self, input_ids: Tensor, kv: Any = None, **kwargs: Any) -> None: ...

    assert cache_argument(New(), 1) == {"cache": 1} and cache_argument(Old(), 1) == {"past_key_values": 1}
    with pytest.raises(SearchError, match="Other of transformers takes self, input_ids, kv, kwargs; expected cache or"):
        cache_argument(Other(), None)


def test_other_parameters_are_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tiny_config())

    def renamed(
        self: Any, hidden_states: Any, q_resid: Any, cos_sin: Any, attention_mask: Any, position_ids: Any, cache: Any
    ) -> None: ...

    monkeypatch.setattr(GlmMoeDsaIndexer, "forward", renamed)
    line = "GlmMoeDsaIndexer of transformers takes hidden_states, q_resid, cos_sin"
    with pytest.raises(KernelInputError, match=f"expected {on_transformers.TESTED}: {line}"), use_kernels(model):
        pass
    monkeypatch.setattr("indexcache_search.hf.device.find_spec", lambda _: object())
    assert resolve_attention("auto", torch.device("cuda")) == "naive"
    with pytest.raises(SearchError, match=f"--engine attention=kernels needs another version: .*{line}"):
        resolve_attention("kernels", torch.device("cuda"))
    with pytest.raises(SearchError, match=line), apply_roles(model, Pattern.parse("FFFFFF+2q4"), prompt=PROMPT):
        pass
    with pytest.raises(SearchError, match=line), apply_roles(model, Pattern("FSFSFS")):
        pass
    with pytest.raises(SearchError, match=line):
        Distillation(model, Pattern("FSFSFS"), "warmup")


def test_other_masks_are_refused() -> None:
    known = {"allow_is_causal_skip": False, "dtype": torch.float32, "config": None, "use_vmap": False}
    assert key_ranges(1, 4, 4, **known).shape == (1, 1, 4, 2)
    with pytest.raises(KernelInputError, match=r"makes masks of window_size, expected 5\.17 to"):
        key_ranges(1, 4, 4, window_size=2, **known)


def test_an_attention_that_takes_no_indices_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(indexer_types=["full", "shared"] * 3)
    model, forward = tiny_model(config), GlmMoeDsaAttention.forward
    description = describe(config, "tiny")
    assert output_similarity(model, description, TOKENS)[1, 1] == pytest.approx(1)

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GlmMoeDsaAttention, "forward", renamed)
    with pytest.raises(SearchError, match="GlmMoeDsaAttention of transformers takes no prev_topk_indices"):
        output_similarity(model, description, TOKENS)
