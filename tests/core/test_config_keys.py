"""What tells one config.json from another, and which keys of it are refused."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe, family_of, known_families
from sglang_indexcache.families.refused import REFUSED
from sglang_indexcache.io.errors import IndexCacheError, ModelConfigError, PatternFileError
from sglang_indexcache.io.messages import OTHER_LENGTH
from sglang_indexcache.model.config_keys import differing
from sglang_indexcache.sglang.override_flag import FLAG
from tests.conftest import DENSE, tiny_config, tiny_dense_config, tiny_hy_v4_config, tiny_v4_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}


CONFIGS = {
    "glm": tiny_config(),
    "glm-yarn": tiny_config(rope_parameters=None, rope_scaling=YARN, rope_theta=1e6),
    "glm-shared": tiny_config(index_topk_freq=2, index_skip_topk_offset=3, indexer_rope_interleave=True),
    "deepseek": tiny_config("deepseek_v32", rope_parameters=None, rope_theta=5000),
    "hy": tiny_hy_v4_config(),
    "v4": tiny_v4_config(),
    "v4-yarn": tiny_v4_config(rope_scaling={**YARN, "factor": 16}),
    **{kind: tiny_dense_config(kind) for kind in DENSE},
    "llama3": tiny_dense_config(
        rope_parameters=None,
        rope_scaling={"rope_type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "no-sizes": {key: value for key, value in tiny_dense_config("qwen2").items() if key != "head_dim"},
}


def saved_again(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers writes of it: all defaults, schedules spelt out, rotary parameters in one place."""
    content: dict[str, Any] = json.loads(AutoConfig.for_model(**config).to_json_string(use_diff=False))
    return {**content, "architectures": config["architectures"]}


def test_a_number_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ModelConfigError, match="hidden_size is nan, expected a number"):
        describe(tiny_config(hidden_size=float("nan")), "x")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_transformers_saved_again_is_the_same(name: str) -> None:
    config = CONFIGS[name]
    saved = saved_again(config)
    assert saved != config
    model, again = describe(config, "first"), describe(saved, "second")
    assert not list(differing(model.config, again.config, "first", "second"))
    assert again == describe(config, "second") and again.native == model.native
    roles = "D" + "S" * (model.num_layers - 1) if model.dense else None
    pattern = Pattern(roles, model.native.selection) if roles else model.native
    file = PatternFile.loads(pattern_file(pattern, config).dumps())
    file.model.check(again)


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("glm", {"index_n_heads": 16}, "index_n_heads is the default in the file, 16 in other"),
        ("glm", {"rope_parameters": {"rope_theta": 7}}, "rope_parameters.rope_theta is the default in the file, 7 in"),
        ("glm", {"rope_interleave": False}, "rope_interleave is the default in the file, False in other"),
        ("glm", {"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types is the default in the file, ['dense', "),
        ("qwen3", {"rope_scaling": YARN}, "rope_parameters.factor is the default in the file, 4 in other"),
        ("qwen3", {"rope_scaling": YARN}, "rope_parameters.rope_type is the default in the file, yarn in other"),
        ("llama", {"head_dim": 32}, "head_dim is 16 in the file, 32 in other"),
        ("v4", {"compress_rope_theta": 7}, "rope_parameters.compress.rope_theta is 160000 in the file, 7 in other"),
        ("v4", {"num_hash_layers": 2}, "num_hash_layers is 1 in the file, 2 in other"),
        ("hy", {"gated_mla": False}, "gated_mla is the default in the file, False in other"),
    ],
)
def test_what_differs_is_named_with_both_values(name: str, changes: dict[str, Any], found: str) -> None:
    config = CONFIGS[name]
    model = describe(config, "first")
    file = pattern_file(model.native, config)
    with pytest.raises(PatternFileError) as error:
        file.model.check(describe({**config, **changes}, "other"))
    assert str(error.value).startswith("model.config: ") and found in str(error.value)


def test_files_without_a_config_are_read_as_they_were() -> None:
    """Their digest is of config.json itself."""
    config = tiny_config()
    model, again = describe(config, "glm"), describe(saved_again(config), "again")
    file = pattern_file(Pattern("FSSFSS"), config)
    section = file.model.model_copy(update={"config": None, "config_sha256": model.earlier_sha256})
    old = PatternFile.loads(file.model_copy(update={"model": section}).dumps())
    assert old.model.config is None
    old.model.check(model)
    with pytest.raises(PatternFileError, match=r"may have more, such as attention_bias, .*, hidden_act, "):
        old.model.check(again)


def test_a_config_that_was_edited_in_the_file_is_refused() -> None:
    text = pattern_file(Pattern("FSSFSS"), tiny_config()).dumps()
    with pytest.raises(PatternFileError, match=r"model.config_sha256: is not that of model.config"):
        PatternFile.loads(text.replace("index_topk: 8", "index_topk: 9"))


# -- what is not known


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen2", "dual_chunk_attention_config", {"chunk_size": 64, "local_size": 8}),
        ("llama", "sliding_window", 64),
        ("llama", "attn_logit_softcapping", 30.0),
        ("llama", "no_rope_layers", [1, 0, 1]),
        ("llama", "per_layer_config", {"1": {"sliding_window": 8}}),
        ("llama", "text_config", {"num_attention_heads": 2}),
        ("qwen3", "attention_sink_size", 4),
        ("qwen2", "attention_bias", True),
        ("mistral", "llama_4_scaling_beta", 0.1),
        ("glm", "llama_4_scaling", {"beta": 0.1}),
        ("glm", "index_kpool", 2),
        ("glm", "kv_sharing", True),
        ("deepseek", "mla_nope", True),
        ("hy", "qk_norm", "l2"),
        ("v4", "candidate_source_layer_id", 2),
        ("v4", "compress_rate_csa", 8),
    ],
)
def test_a_key_that_changes_attention_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(ModelConfigError, match=f"tiny: config.json: {key} "):
        describe({**CONFIGS[name], key: value}, "tiny")
    config = {**CONFIGS[name], key: None}
    assert describe(config, "tiny") == describe(CONFIGS[name], "tiny")


def test_keys_of_rotary_parameters_are_known_too() -> None:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    with pytest.raises(ModelConfigError, match=r"rope_parameters.mrope_section is \[2, 3, 3\], which may change"):
        describe(tiny_dense_config(rope_parameters=rope), "tiny")
    with pytest.raises(ModelConfigError, match="rope_scaling is 'yarn', expected a mapping"):
        describe(tiny_dense_config(rope_scaling="yarn"), "tiny")


@pytest.mark.parametrize(
    "more",
    [
        {"unsloth_fixed": True, "unsloth_version": "2026.1", "_name_or_path": "x"},
        {"_attn_implementation_autoset": True, "attention_dropout": 0.1, "pretraining_tp": 2},
        {"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"type": "float"}}},
        {"use_mrope": False, "alibi": False, "attention_chunk_size": None, "num_kv_shared_layers": 0},
        {"eos_token_id": [1, 2], "torch_dtype": "float16", "tokenizer_class": "X", "task_specific_params": {"a": 1}},
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("name", ["glm", "v4", "llama", "qwen3_moe"])
def test_what_people_and_programs_add_is_no_other_model(name: str, more: dict[str, Any]) -> None:
    assert describe({**CONFIGS[name], **more}, "tiny").config_sha256 == describe(CONFIGS[name], "tiny").config_sha256


@pytest.mark.parametrize("name", ["glm", "hy", "v4", "llama"])
def test_overrides_are_held_to_the_same_lists(name: str) -> None:
    model = describe(CONFIGS[name], "tiny")
    served = family_of(model.architecture).sglang
    served.to_overrides(
        {"rope_scaling": YARN, "indexcache": {"source": "x"}, "max_position_embeddings": 64}, model.native
    )
    for key, value in {
        "dual_chunk_attention_config": {"chunk_size": 8},
        "attention_chunk_size": 8,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "granite",
    }.items():
        with pytest.raises(IndexCacheError, match=f"{FLAG}: {key} "):
            served.to_overrides({key: value}, model.native)


def test_a_model_type_of_another_model_is_refused() -> None:
    """transformers builds by it, SGLang by `architectures`."""
    with pytest.raises(ModelConfigError, match="model_type is 'granite', expected 'llama'"):
        describe({**tiny_dense_config(), "model_type": "granite"}, "tiny")


@pytest.mark.parametrize("architecture", [name for family in known_families() for name in family.checkpoint.keys])
def test_every_key_of_transformers_class_is_known_with_its_default(architecture: str) -> None:
    keys = family_of(architecture).checkpoint.keys[architecture]
    blank = AutoConfig.for_model(keys.model_type)
    declared = {item.name for item in fields(type(blank))}
    assert not {key for key in declared if key not in keys.known}
    written = {item.name: item.default for item in fields(type(blank))}
    for key, default in keys.defaults.items():
        if key in declared and key not in ("mlp_only_layers",):
            assert written[key] == default, key


def test_refused_architectures_are_some_that_an_engine_has() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    heads = {name for names in (CAUSAL, MODEL_MAPPING_NAMES) for name in map(str, names.values())}
    stems = {name.removesuffix("Model").removesuffix("ForCausalLM") for name in heads}
    only_sglang = {
        "MiniCPMSALAForCausalLM",
        "MiniCPMForCausalLM",
        "KimiLinearForCausalLM",
        "MistralLarge3ForCausalLM",
        "Dots3NoteForCausalLM",
        "Glm5NextForConditionalGeneration",
    }
    for name in set(REFUSED) - only_sglang:
        assert name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") in stems, name
    config = {"architectures": ["MiniCPMSALAForCausalLM"], "model_type": "minicpm_sala"}
    with pytest.raises(ModelConfigError, match="sala: its attention was trained to be sparse; expected"):
        describe(config, "sala")


@pytest.mark.sglang
def test_sglang_has_the_refused_architectures_that_transformers_has_not() -> None:
    registry = pytest.importorskip("sglang.srt.models.registry")
    known = set(registry.ModelRegistry.get_supported_archs())
    assert {"Dots3NoteForCausalLM", "Glm5NextForConditionalGeneration", "MistralLarge3ForCausalLM"} <= known


# -- windows, and layers that engines don't read


def test_a_window_that_no_layer_has_is_none() -> None:
    on = {"use_sliding_window": True, "sliding_window": 64}
    plain = describe(tiny_dense_config("qwen2"), "tiny")
    for more in ({"max_window_layers": 6}, {}, {"layer_types": ["full_attention"] * 6}):
        assert describe(tiny_dense_config("qwen2", **on, **more), "tiny") == plain  # 28 where it says nothing
    for more in ({"max_window_layers": 5}, {"max_window_layers": 0}):
        with pytest.raises(ModelConfigError, match="sliding_window is 64, expected layers that see all"):
            describe(tiny_dense_config("qwen2", **on, **more), "tiny")
    with pytest.raises(ModelConfigError, match="sliding_window is 64"):  # whose class knows no max_window_layers
        describe(tiny_dense_config("qwen3_moe", **on, max_window_layers=6), "tiny")
    mistral = tiny_dense_config("mistral")
    del mistral["sliding_window"]
    with pytest.raises(ModelConfigError, match="sliding_window is not there, which transformers takes for 4096"):
        describe(mistral, "tiny")


@pytest.mark.parametrize("key", ["indexer_types", "index_topk_pattern"])
def test_entries_of_nextn_layers_are_read_by_nobody(key: str) -> None:
    longer = ["full", "full", "shared", "full", "shared", "shared", "full"] if key == "indexer_types" else "FFSFSSF"
    model = describe(tiny_config(**{key: longer}, num_nextn_predict_layers=1), "glm")
    assert model.native.roles == "FFSFSS"
    for more in ({}, {"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": True}):
        with pytest.raises(ModelConfigError, match=OTHER_LENGTH.format(7, 6)):
            describe(tiny_config(**{key: longer}, **more), "glm")


# -- at random

_NAMES = [
    "attention",
    "window",
    "rope",
    "kv",
    "heads",
    "scale",
    "index",
    "layers",
    "chunk",
    "mode",
    "x",
    "fixed",
    "dim",
]
_VALUES: list[Any] = [None, False, 0, [], {}, "", True, 1, 8, 0.5, "x", [1], {"a": 1}, {"window": 8}, -1, 1e300]


def test_a_thousand_configs_with_more_and_other_keys(tmp_path: Path) -> None:
    """One line, or a model that is the same unless a known key says otherwise."""
    rng = random.Random(5)
    refused = same = 0
    for number in range(1000):
        name = rng.choice(sorted(CONFIGS))
        config = dict(CONFIGS[name])
        model = describe(config, "tiny")
        known = family_of(model.architecture).checkpoint.keys[model.architecture].known
        key = "_".join(rng.sample(_NAMES, rng.randint(1, 3))) if number % 2 else rng.choice(sorted(known))
        value = rng.choice(_VALUES)
        try:
            changed = describe({**config, key: value}, "tiny")
        except IndexCacheError as error:
            refused += 1
            assert "\n" not in str(error)
            continue
        if key in known:
            continue
        same += 1
        assert changed == model
        off = value in (None, False, 0, [], {}, "")
        assert off or not {"attention", "window", "rope", "kv", "heads", "chunk"} & set(key.split("_"))
    assert refused > 100 and same > 100
