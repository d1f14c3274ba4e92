"""What a MiniMax-M3 checkpoint must say, and what a pattern on it looks like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extras.minimax.tests.models import FREQ, LAYERS, SITES, TOKENS, alone, sparse, text, whole
from indexcache_minimax.family.keys import TEXT
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.io.errors import IndexCacheError, ModelConfigError
from sglang_indexcache.model.layers import ModelLayers

RELEASED = {  # sizes of MiniMax-M3, as engines' own tests have them
    "num_hidden_layers": 60,
    "num_key_value_heads": 4,
    "moe_layer_freq": [0] * 3 + [1] * 57,
    "sparse_attention_config": sparse(
        sparse_num_index_heads=4,
        sparse_index_dim=128,
        sparse_topk_blocks=16,
        sparse_block_size=128,
        sparse_attention_freq=[0] * 3 + [1] * 57,
        sparse_disable_index_value=[0] * 3 + [1] * 57,
    ),
}
FLAT = {
    "architectures": ["MiniMaxM3VLForCausalLM"],
    "model_type": "minimax_m3_vl_text",
    **{key: value for key, value in text().items() if not key.startswith(("sparse_", "model_", "rope_", "partial_"))},
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["minimax_m3_sparse" if site else "full_attention" for site in FREQ],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_block_size": 4,
    "index_topk_blocks": 4,
    "index_local_blocks": 1,
}


def read(config: dict[str, Any]) -> ModelLayers:
    return describe(config, "m3")


def test_a_letter_stands_for_each_layer_with_an_index() -> None:
    for config in (alone(), whole(), FLAT):
        model = read(config)
        assert model.layers == SITES and model.num_layers == 5 and model.locked == () and not model.dense
        assert (model.first_sparse_position, model.index_topk) == (TOKENS, TOKENS)
        assert family_of(model.architecture).name == "minimax_m3"
    released = read(whole(**RELEASED))
    assert released.layers == tuple(range(3, 60)) and released.first_sparse_position == 2048


def test_it_is_one_model_however_it_was_saved() -> None:
    """But for the architecture, which a pattern file says, too."""
    facts = [read(config).config for config in (alone(), whole(), FLAT)]
    assert facts[0] == facts[1] == facts[2]
    other = (
        alone(routed_scaling_factor=1.5),
        alone(moe_layer_freq=[1] * LAYERS),
        alone(sparse_attention_config=sparse(sparse_topk_blocks=5)),
        alone(sparse_attention_config=sparse(sparse_local_block=2)),
        alone(rope_theta=20000),
        {**FLAT, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    )
    assert len({str(item) for item in (facts[0], *(read(config).config for config in other))}) == 1 + len(other)
    assert read(alone(num_mtp_modules=3, attn_type_list=[1] * 7, use_cache=True)) == read(alone())


VALUED = [0, 1, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (alone(sparse_attention_config=sparse(sparse_disable_index_value=VALUED)), "is 0 for layer 2, whose index has"),
        (alone(sparse_attention_config=sparse(sparse_disable_index_value=None)), "sparse_disable_index_value is None"),
        (
            alone(sparse_attention_config=sparse(sparse_attention_freq=FREQ[:-1])),
            "expected 0 or 1 for each of 7 layers",
        ),
        (alone(sparse_attention_config=sparse(sparse_attention_freq=[0] * 7)), "no layer chooses blocks"),
        (alone(sparse_attention_config=sparse(sparse_score_type="lse")), "sparse_score_type is 'lse', expected 'max'"),
        (alone(sparse_attention_config=sparse(sparse_init_block=1)), "sparse_init_block is 1, expected 0"),
        (alone(sparse_attention_config=sparse(use_sparse_attention=False)), "use_sparse_attention is False"),
        (alone(sparse_attention_config=sparse(sparse_num_index_heads=4)), "4 index heads choose for 2 key heads"),
        (
            alone(sparse_attention_config=sparse(sparse_topk_blocks=0)),
            "sparse_topk_blocks is 0, expected a number of 1",
        ),
        (alone(sparse_attention_config=sparse(sparse_local_block=9)), "9 local blocks don't fit into 4"),
        (alone(sparse_attention_config="all"), "sparse_attention_config is 'all', expected a mapping"),
        (alone(index_topk_blocks=8), "sparse_topk_blocks is 4 and index_topk_blocks is 8, which are one and the same"),
        (alone(rotary_dim=32), "rotary_dim is 32, which SGLang reads, and partial_rotary_factor 0.5 of 32"),
        (alone(use_gemma_norm=False), "use_gemma_norm is False, expected True"),
        ({key: value for key, value in alone().items() if key != "use_gemma_norm"}, "use_gemma_norm is missing"),
        (alone(hidden_act="gelu"), "hidden_act is 'gelu', expected swigluoai"),
        (alone(shared_intermediate_size=64), "shared_intermediate_size is 64, expected intermediate_size"),
        (alone(model_type="minimax_m3_mtp"), "model_type is 'minimax_m3_mtp', expected one of minimax_m2"),
        (alone(sliding_window=128), "sliding_window is 128, which may change attention"),
        (alone(index_topk_freq=4), "index_topk_freq is '4', which SGLang does not read on MiniMax-M3"),
        ({**whole(), "index_topk_pattern": "FSSSS"}, "index_topk_pattern is 'FSSSS', which SGLang does not read"),
        ({**whole(), "text_config": None}, "text_config is None, expected the text model"),
        ({**whole(), "architectures": [TEXT]}, "text_config is of MiniMaxM3SparseForConditionalGeneration"),
        ({**whole(), "model_type": "minimax_m3"}, "model_type is 'minimax_m3', expected 'minimax_m3_vl'"),
        ({**FLAT, "layer_types": ["sliding_attention"] * 7}, "expected minimax_m3_sparse or full_attention for each"),
        ({**FLAT, "index_block_size": True}, "index_block_size is True, expected a number of 1 or more"),
    ],
)
def test_a_config_that_means_another_attention_is_refused_by_name(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ModelConfigError) as refused:
        read(config)
    said = str(refused.value)
    assert line in said and said.startswith("m3: config.json: ") and "\n" not in said


def test_drafts_of_minimax_m3_and_models_beside_it_have_lines_of_their_own() -> None:
    with pytest.raises(ModelConfigError, match="MiniMaxM3MTP drafts for another model"):
        read({"architectures": ["MiniMaxM3MTP"], "model_type": "minimax_m3_mtp"})
    with pytest.raises(ModelConfigError, match="MiniMaxM4ForCausalLM has no attention known here"):
        read({**alone(), "architectures": ["MiniMaxM4ForCausalLM"]})


def test_which_tensors_are_of_an_index() -> None:
    reader = family_of(TEXT).checkpoint
    names = [
        "language_model.model.layers.3.self_attn.index_q_proj.weight",
        "model.layers.4.self_attn.indexer.q_proj.weight",
        "model.layers.5.self_attn.q_proj.weight",
        "language_model.model.mtp.layers.0.self_attn.index_q_proj.weight",
        "vision_tower.vision_model.encoder.layers.6.self_attn.index_q_proj.weight",
    ]
    assert reader.indexer_layers(names) == {3, 4}


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        ("SFFFF", "pattern begins with S, but layer 0 has no earlier layer to share from"),  # nothing was chosen yet
        (
            "FFSFFSS",
            "problem: pattern has 7 letters, model has 5 layers that select",
        ),  # the layers without an index have none
        ("FDSFS", "FDSFS has a D, which needs a selection"),
        ("FSFSS", None),
    ],
)
def test_the_command_checks_a_pattern(
    pattern: str, line: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m3"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole()))
    code, said = check_main([pattern, "--model", str(folder)]), capsys.readouterr()
    if line is None:
        assert code == 0 and "minimax" not in said.err.lower(), said
        return
    lines = [item for item in (said.out + said.err).splitlines() if line in item]
    assert code in (1, 2) and len(lines) == 1, said


def test_overrides_of_the_schedule_are_refused() -> None:
    from sglang_indexcache import Pattern

    adapter = family_of(TEXT).sglang
    for key, value in (
        ("sparse_attention_config", sparse()),
        ("num_hidden_layers", 5),
        ("text_config", {"num_hidden_layers": 5}),
        ("index_topk_freq", 4),
        ("architectures", [TEXT]),
        ("sliding_window", 128),
    ):
        with pytest.raises(IndexCacheError, match=key):
            adapter.to_overrides({key: value}, Pattern("FSFSS"))
    assert adapter.to_overrides({"max_position_embeddings": 64}, Pattern("FSFSS")) == {"max_position_embeddings": 64}
