"""Keys that people and programs leave in a config.json: which are no other model, and which contradict it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.refused import refusal
from sglang_indexcache.io.errors import IndexCacheError, ModelConfigError
from sglang_indexcache.io.messages import NO_INDEXER
from sglang_indexcache.model.incidental import INCIDENTAL, is_incidental
from tests.conftest import tiny_config, tiny_dense_config, tiny_v4_config

CONFIGS = {
    "glm": tiny_config(),
    "v4": tiny_v4_config(),
    "llama": tiny_dense_config(),
    "qwen3": tiny_dense_config("qwen3"),
}
V3 = "DeepseekV3ForCausalLM"
GLM_AS_V3 = tiny_config(architectures=[V3])
EARLY = {**tiny_config("deepseek_v32"), "architectures": [V3], "model_type": "deepseek_v3"}  # a DeepSeek-V3.2
OLD_SAVE = {  # what transformers 4 writes with use_diff=False
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "keys_to_ignore_at_inference": ["past_key_values"],
    "max_length": 20,
    "no_repeat_ngram_size": 0,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "top_k": 50,
}


@pytest.mark.parametrize(
    "more",
    [
        {"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41], "num": 1},
        {"dspark_config": {"block_size": 5, "num_layers": 3, "target_layer_ids": [1, 2]}},
        {"speculative_decoding": {"method": "dspark", "target_layer_ids": [1, 2]}},
        {"quantization": {"group_size": 64, "bits": 4, "model.layers.0.self_attn.indexer.wk": False}},
        {"compression_config": {"sparsity_config": {"targets": ["Linear"]}}, "sparsity_config": {"format": "dense"}},
        {"task_specific_params": {"text-generation": {"top_k": 50, "max_length": 9}}},
        {"mask_token_id": 3, "image_token_index": 7, "sequence_bias": {"[5]": -1.0}, "prefill_chunk_size": 64},
        {"reap_pruned_experts": {"layer_3": [1, 2]}, "original_n_routed_experts": 256},
        {"gradient_checkpointing": True, "attn_dropout": 0.1, "use_flash_attention_3": True},
        {"is_causal": True},
        OLD_SAVE,
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_about_the_model_makes_no_other_model(name: str, more: dict[str, Any]) -> None:
    assert describe({**CONFIGS[name], **more}, "tiny") == describe(CONFIGS[name], "tiny")


def test_all_keys_of_generation_are_known() -> None:
    """transformers takes each of them out of a config.json."""
    assert not [key for key in GenerationConfig._get_default_generation_params() if not is_incidental(key)]


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("glm", {"attention_mode": "hybrid"}, "attention_mode is hybrid, which may change attention"),
        ("glm", {"sparkling_layers": [1]}, "sparkling_layers is .*, which may change attention"),
        ("glm", {"index_cache": {"freq": 4}}, "index_cache is .*, which may change attention"),
        ("v4", {"sparse_config": {"topk": 4}}, "sparse_config is .*, which may change attention"),
        ("llama", {"use_index_cache": True}, "use_index_cache is True, which may change attention"),
        ("llama", {"pruned_heads": {"1": [0]}}, "pruned_heads is .*, which may change attention"),
        # switched off is not what their absence means
        ("glm", {"is_causal": False}, "is_causal is False, expected True"),
        ("llama", {"is_causal": False}, "is_causal is False, expected True"),
        ("llama", {"rope_is_neox_style": False}, "rope_is_neox_style is False, expected True"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm is False, expected True"),
        # which of the two are the weights'?
        ("glm", {"num_layers": 7}, "num_layers is 7 and num_hidden_layers 6, which engines read; expected the same"),
        ("llama", {"n_heads": 2}, "n_heads is 2 and num_attention_heads 4"),
        ("glm", {"num_local_experts": 3}, "n_routed_experts is 4 and num_local_experts is 3, .* expected one value"),
    ],
)
def test_what_is_unknown_or_contradicts_is_refused(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=f"tiny: config.json: {message}"):
        describe({**CONFIGS[name], **more}, "tiny")


def test_the_same_in_another_programs_words_is_the_same_model() -> None:
    for name in CONFIGS:
        model = describe(CONFIGS[name], "tiny")
        heads = CONFIGS[name]["num_attention_heads"]
        words = {"num_layers": CONFIGS[name]["num_hidden_layers"], "n_heads": heads, "n_layer": None}
        assert describe({**CONFIGS[name], **words}, "tiny") == model
    full = {"layer_types": ["full_attention"] * 6}
    assert describe({**CONFIGS["llama"], **full}, "tiny") == describe(CONFIGS["llama"], "tiny")


def test_vllms_switch_is_none_of_sglangs() -> None:
    """SGLang and transformers share by the schedule alone, whatever it says."""
    schedule = {"index_topk_freq": 2, "index_skip_topk_offset": 3}
    shared = describe({**CONFIGS["glm"], **schedule}, "tiny")
    for value in (True, False):
        assert describe({**CONFIGS["glm"], **schedule, "use_index_cache": value}, "tiny") == shared
        assert describe({**CONFIGS["glm"], "use_index_cache": value}, "tiny") == describe(CONFIGS["glm"], "tiny")
    served = family_of(shared.architecture).sglang
    served.to_overrides({"use_index_cache": True, "index_topk_pattern": "FFFSFS"}, shared.native)


# -- models under another's name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            GLM_AS_V3,
            "labelled DeepseekV3ForCausalLM, and has index_topk, .*SGLang runs them under this name, too, .*expected in"
            r' config.json "architectures": \["GlmMoeDsaForCausalLM"\], "model_type": "glm_moe_dsa"$',
        ),
        (
            {**tiny_config(architectures=["Glm4MoeLiteForCausalLM"]), "model_type": "glm4_moe_lite"},
            "has index_topk, .*: SGLang would not run them under this name; expected",
        ),
        (
            {**tiny_v4_config(), "architectures": [V3], "model_type": "deepseek_v3"},
            "labelled DeepseekV3ForCausalLM, and has compress_ratios, as DeepseekV4ForCausalLM .*another model; "
            r'expected in config.json "architectures": \["DeepseekV4ForCausalLM"\], "model_type": "deepseek_v4"$',
        ),
        ({**tiny_v4_config(), "architectures": ["DeepseekV32ForCausalLM"]}, "labelled DeepseekV32ForCausalLM, and has"),
        (
            {"architectures": [V3], "model_type": "deepseek_v3", "index_topk": None},
            "its latent attention \\(MLA\\) is dense; docs/distill.md says how indexers are trained",
        ),
        (
            tiny_config(architectures=[]),
            'has no architectures, by which SGLang goes; expected .*"GlmMoeDsaForCausalLM"',
        ),
        (
            tiny_config(architectures=["DeepseekV3ForCausalLMNextN"]),
            "drafts for another model, .*; expected that model$",
        ),
        (
            tiny_config(architectures=["Glm5ForCausalLM"]),
            "Glm5ForCausalLM has no attention .* GlmMoeDsaForCausalLM there",
        ),
        (
            tiny_config(architectures=["X", "GlmMoeDsaForCausalLM"]),
            "X has no attention known here, and SGLang goes by the",
        ),
        (
            {"architectures": ["Glm5vMoeForConditionalGeneration"], "text_config": tiny_config()},
            "holds GlmMoeDsaForCausalLM in its text_config, where patterns were never tried; expected",
        ),
        (
            {"architectures": ["Dots3NoteForCausalLM"], "index_topk": 8, "kv_lora_rank": 8},
            "it has indexers, but patterns were never tried on it",
        ),
    ],
)
def test_a_model_under_another_name_is_told_what_it_is(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message) as error:
        describe(config, "tiny")
    assert str(error.value).startswith("tiny: ")


@pytest.mark.parametrize("name", CONFIGS)
def test_no_model_of_a_family_is_taken_for_another(name: str) -> None:
    model = describe(CONFIGS[name], "tiny")
    assert refusal(CONFIGS[name], model.architecture) is None


def test_the_mended_label_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the message asks for is enough."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM_AS_V3))
    assert main(["FSSFSS", "--model", str(tmp_path)]) == 2
    asked = json.loads("{" + capsys.readouterr().err.rpartition("config.json ")[2] + "}")
    path.write_text(json.dumps({**GLM_AS_V3, **asked}))
    assert main(["FSSFSS", "--model", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "label", [{}, {"model_type": "deepseek_v32"}, {"model_type": None}, {"auto_map": {"A": "b.C"}}]
)
def test_deepseek_v32_by_the_name_of_v3_is_the_same_model(label: dict[str, Any]) -> None:
    """SGLang tells them apart by index_topk; pattern files, prices and published letters are those of V3.2."""
    named = describe({**EARLY, **label}, "tiny")
    assert named == describe(tiny_config("deepseek_v32"), "tiny")
    assert named.architecture == "DeepseekV32ForCausalLM" and family_of(named.architecture).name == "dsa"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 0}, "index_topk is 0, expected a positive integer"),
        ({"index_topk": "2048"}, "index_topk is '2048', expected a positive integer"),
        ({"index_topk": None}, r"its latent attention \(MLA\) is dense"),
        ({"index_n_heads": "x"}, "index_n_heads is x, expected a number"),
        ({"indexer_rope_interleave": True}, '"model_type": "glm_moe_dsa"$'),
        ({"model_type": "kimi_k2"}, "model_type is 'kimi_k2', expected 'deepseek_v32'"),
        ({"architectures": V3}, "architectures is 'DeepseekV3ForCausalLM', expected a list"),
        ({"architectures": ["X", V3]}, "X, DeepseekV3ForCausalLM has no attention known here"),
    ],
)
def test_what_the_name_of_v3_does_not_explain(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        describe({**EARLY, **changes}, "tiny")
    dense = {key: value for key, value in EARLY.items() if not key.startswith("index_")}
    with pytest.raises(ModelConfigError, match=r"is dense; docs/distill.md"):
        describe(dense, "tiny")


def test_a_file_for_v32_fits_the_same_model_by_the_name_of_v3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EARLY))
    pattern_file(Pattern("FSSFSS"), tiny_config("deepseek_v32")).save(tmp_path / "p.yaml")
    command = [str(tmp_path / "p.yaml"), "--model", str(tmp_path)]
    assert main(command) == 0 and capsys.readouterr().out.endswith("no problems\n")
    indexers = {f"model.layers.{layer}.self_attn.indexer.wk.weight": torch.zeros(1) for layer in (0, 4)}
    for tensors, missing in ((indexers, "3"), ({"model.norm.weight": torch.zeros(1)}, "0")):
        save_file(tensors, tmp_path / "model.safetensors")
        assert main(command) == 1
        found = capsys.readouterr().out
        assert f"pattern has F for layer {missing}" in found and NO_INDEXER in found


def test_overrides_may_hold_what_a_config_may(tmp_path: Path) -> None:
    model = describe(CONFIGS["glm"], "tiny")
    served = family_of(model.architecture).sglang
    served.to_overrides({"top_k": 50, "dspark_config": {"layers": 2}}, model.native)
    for given in ({"is_causal": False}, {"num_layers": 3}, {"index_cache": {"freq": 4}}):
        with pytest.raises(IndexCacheError, match=f"--json-model-override-args: {next(iter(given))} "):
            served.to_overrides(given, model.native)


def test_no_key_is_listed_that_a_family_reads() -> None:
    for config in CONFIGS.values():
        keys = family_of(config["architectures"][0]).checkpoint.keys[config["architectures"][0]]
        assert not {*keys.defaults, *keys.aliases, *keys.only, *keys.read_elsewhere} & INCIDENTAL
