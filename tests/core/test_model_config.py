"""What config.json says about a DSA model."""

from __future__ import annotations

from typing import Any

import pytest

from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import load_model
from sglang_indexcache.families import describe, family_of, known_families
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.io.messages import BEGINS_SHARED, OTHER_LENGTH
from tests.conftest import tiny_config, tiny_hy_v4_config


def test_reads_layers_topk_and_native_sharing() -> None:
    model = describe(tiny_config(index_topk_freq=2, index_skip_topk_offset=3), "glm")
    assert (model.num_layers, model.index_topk, model.native.roles) == (6, 8, "FFFSFS")
    assert model.locked == (3, 5)
    assert describe(tiny_config(), "glm").locked == ()


def digest(config: dict[str, Any]) -> str:
    return describe(config, "glm").config_sha256


def test_digest_ignores_what_does_not_change_the_model() -> None:
    config = tiny_config()
    same = {**config, "quantization_config": {"bits": 8}, "dtype": "bfloat16", "transformers_version": "9"}
    assert digest(dict(reversed(same.items()))) == digest(config)
    for change in ({"index_topk": 16}, {"num_hidden_layers": 7}, {"index_topk_pattern": "FFSFFF"}):
        assert digest({**config, **change}) != digest(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GraniteForCausalLM"]}, "GraniteForCausalLM has no attention"),
        ({"architectures": None}, "glm_moe_dsa has no attention"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"index_topk": None}, "index_topk is None"),
        ({"index_topk_pattern": "FF"}, OTHER_LENGTH.format(2, 6)),
        ({"indexer_types": ["shared"] * 6}, BEGINS_SHARED),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        describe(tiny_config(**changes), "glm")


def hy_v4(layers: int = 11, **changes: Any) -> dict[str, Any]:
    return tiny_hy_v4_config(num_hidden_layers=layers, **changes)


def test_hy_v4_has_one_indexer_in_four_where_its_config_says_nothing() -> None:
    """As `HYV4Config` of SGLang 0.5.23 fills it in."""
    model = describe(hy_v4(), "hy4")
    assert model.native.roles == "FFSSSFSSSFS" and model.locked == (2, 3, 4, 6, 7, 8, 10)
    assert model.layers == tuple(range(11)) and family_of(model.architecture).name == "hy_v4"
    types = ["full", "shared"] * 3
    assert describe(hy_v4(6, indexer_types=types), "hy4").native.roles == "FSFSFS"
    with pytest.raises(ModelConfigError, match=BEGINS_SHARED):
        describe(hy_v4(6, indexer_types=["shared", "full"] * 3), "hy4")


def test_transformers_is_not_taken_for_hy_v4() -> None:
    with pytest.raises(SearchError, match=r"rotates halves .* expected --engine sglang"):
        load_model("hy4", describe(hy_v4(), "hy4"), "auto")


def test_every_architecture_has_one_family() -> None:
    architectures = [item for family in known_families() for item in family.checkpoint.keys]
    assert len(architectures) == len(set(architectures))
    assert len({family.name for family in known_families()}) == len(known_families())
    with pytest.raises(ModelConfigError, match="GraniteForCausalLM has no attention known here, expected Deepseek"):
        family_of("GraniteForCausalLM")
