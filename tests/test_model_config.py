"""What config.json says about a DSA model."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_indexcache.errors import ModelConfigError
from sglang_indexcache.families import describe
from sglang_indexcache.model import config_digest
from tests.conftest import tiny_config


def test_reads_layers_topk_and_native_sharing() -> None:
    model = describe(tiny_config(index_topk_freq=2, index_skip_topk_offset=3), "glm")
    assert (model.num_layers, model.index_topk, model.native.roles) == (6, 8, "FFFSFS")
    assert model.locked == (3, 5)
    assert describe(tiny_config(), "glm").locked == ()


def test_digest_ignores_what_does_not_change_the_model() -> None:
    config = tiny_config()
    same = {**config, "quantization_config": {"bits": 8}, "dtype": "bfloat16", "transformers_version": "9"}
    assert config_digest(dict(reversed(same.items()))) == config_digest(config)
    for change in ({"index_topk": 16}, {"num_hidden_layers": 7}, {"index_topk_pattern": "FFSFFF"}):
        assert config_digest({**config, **change}) != config_digest(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM has no DSA attention"),
        ({"architectures": None}, "glm_moe_dsa has no DSA attention"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"index_topk": None}, "index_topk is None"),
        ({"index_topk_pattern": "FF"}, "2 letters, model has 6 DSA layers"),
        ({"indexer_types": ["shared"] * 6}, "begins with S"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        describe(tiny_config(**changes), "glm")
