"""Architectures that people try, and why patterns are not for them; and models that go under another's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REASONS = {
    "its latent attention (MLA) is dense; docs/distill.md says how indexers are trained for it": """
        DeepseekV2ForCausalLM DeepseekV3ForCausalLM Glm4MoeLiteForCausalLM
    """,
    "some of its layers see a sliding window": """
        Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration Gemma4ForCausalLM
        Gemma4ForConditionalGeneration Cohere2ForCausalLM
    """,
    "most of its layers see the chunk that they are in": "Llama4ForCausalLM Llama4ForConditionalGeneration",
    "its layers have attention sinks, and some see a sliding window": "GptOssForCausalLM",
    "most of its layers are linear": """
        Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3_5ForConditionalGeneration
        Qwen3_5MoeForConditionalGeneration MiniMaxForCausalLM KimiLinearForCausalLM
    """,
    "its attention was trained to be sparse": "MiniCPMSALAForCausalLM",
    "its layers are scaled, and those of MiniCPM4.1 were trained to be sparse": "MiniCPMForCausalLM",
    "it sees images, too": """
        Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration
        Qwen3VLMoeForConditionalGeneration Mistral3ForConditionalGeneration
    """,
    "it has layers of cross attention": "MllamaForConditionalGeneration",
    "it has an encoder": "T5ForConditionalGeneration",
    "LongCat's sharing (cli_factor) is trained in and wins over any pattern": "LongcatFlashForCausalLM",
    "it has indexers, but patterns were never tried on it": """
        MistralLarge3ForCausalLM Dots3NoteForCausalLM Glm5NextForConditionalGeneration
    """,
}
REFUSED = {architecture: reason for reason, architectures in _REASONS.items() for architecture in architectures.split()}

_DRAFTS = ("NextN", "MTP", "DSpark", "Eagle", "Eagle3", "DraftModel")
_V3, _V32, _V4 = "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"
_GLM = "GlmMoeDsaForCausalLM"
# Models with indexers: transformers builds one by its model_type, SGLang by its architecture.
_LABELS = {"deepseek_v32": _V32, "deepseek_v4": _V4, "glm_moe_dsa": _GLM, "hy_v4": "HYV4ForCausalLM"}
_MLA = (_V3, "DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM")  # architectures of models without indexers


def renamed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of a DeepSeek-V3.2 that goes by the name of DeepSeek-V3 as the same under its own name.

    SGLang tells the two apart by `index_topk` alone, and has one configuration class for both; transformers would build
    a model without indexers. Read: `is_deepseek_dsa` in srt/configs/model_config.py, `_DeepseekV32ConfigAlias` in
    srt/utils/hf_transformers/common.py of SGLang 0.5.17 and 0.5.23.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or named[:1] != [_V3] or _meant(config) != _V32:
        return config
    kind = {"model_type": "deepseek_v32"} if config.get("model_type") == "deepseek_v3" else {}
    return {**config, "architectures": [_V32], **kind}


def refusal(config: Mapping[str, Any], architecture: str) -> str | None:
    """Return why no pattern is for a model; `None` if its architecture is not known, or is one of a family.

    SGLang goes by the first of its `architectures`.
    """
    meant, inner = _meant(config), config.get("text_config")
    within = _meant(inner) if isinstance(inner, Mapping) else None
    if meant is not None and architecture in (*_MLA, *([_V32] if meant == _V4 else [])):
        return _mislabelled(meant, architecture)
    if architecture.endswith(_DRAFTS):
        return f"{architecture} drafts for another model, and no pattern is about its layers; expected that model"
    if within is not None and architecture not in REFUSED:
        return f"{architecture} holds {within} in its text_config, where patterns were never tried"
    return REFUSED.get(architecture)


def label(config: Mapping[str, Any]) -> str | None:
    """Return the architecture that a model of this `model_type` has, of those that have indexers."""
    return _LABELS.get(str(config.get("model_type")))


def _mislabelled(meant: str, architecture: str) -> str:
    """Return what SGLang makes of a model with another's architecture, and what is to be changed in its config.json."""
    if meant == _V4:
        found, effect = "compress_ratios", "SGLang would build another model"
    elif architecture == _V3:
        found, effect = "index_topk", "SGLang runs them under this name, too, and transformers goes by model_type"
    else:
        found, effect = "index_topk", "SGLang would not run them under this name"
    kind = next(kind for kind, item in _LABELS.items() if item == meant)
    return (
        f"labelled {architecture}, and has {found}, as {meant} with its indexers: {effect}; expected in config.json"
        f' "architectures": ["{meant}"], "model_type": "{kind}"'
    )


def _meant(config: Mapping[str, Any]) -> str | None:
    """Return the architecture of a model with indexers by the other keys of its config.json; `None` if it has none."""
    if config.get("compress_ratios") or label(config) == _V4:
        return _V4
    if config.get("index_topk") is None:
        return None
    return label(config) or (_GLM if config.get("indexer_rope_interleave") else _V32)
