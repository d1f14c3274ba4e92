"""A dense model's attention does not ask what its layers do behind it: Qwen3's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from indexcache_dense.hf.engine import PageEngine
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe, family_of
from tests.conftest import PAGES, random_tokens, tiny_dense_config, tiny_model


def engine(prefix_cache_gb: float) -> PageEngine:
    config = tiny_dense_config("qwen3_moe")
    model = tiny_model(config)
    model.set_attn_implementation("eager")
    description = describe(config, "tiny")
    assert family_of(description.architecture).name == "dense_gqa"
    selecting = family_of(description.architecture).checkpoint.selecting(description, PAGES)
    return PageEngine(model, selecting, prefix_cache_gb=prefix_cache_gb)


def test_a_mixture_of_experts_is_evaluated_as_any_dense_model() -> None:
    data = random_tokens(2, 40, first_sparse_position=16)
    patterns = [Pattern(roles, PAGES) for roles in ("DDDDDD", "DSSDSS", "DSSSSS")]
    reusing, plain = engine(1.0), engine(0.0)
    found, expected = (list(one.evaluate(patterns, data, "nll")) for one in (reusing, plain))
    assert {item.pattern: item.losses for item in found} == {item.pattern: item.losses for item in expected}
    dense, some, few = (next(item.losses for item in found if item.pattern == pattern) for pattern in patterns)
    assert dense != some != few
    room = replace(PAGES, pages=64)
    [wide] = plain.evaluate([Pattern("DSSSSS", room)], replace(data, scored=data.scored), "nll")
    assert all(abs(own - other) < 1e-3 for own, other in zip(wide.losses, dense, strict=True))
