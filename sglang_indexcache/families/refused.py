"""Architectures that people try, and why patterns are not for them."""

from __future__ import annotations

REFUSED = {
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "its latent attention (MLA) has no pages of keys"
    ),
    **dict.fromkeys(
        (
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "Gemma3ForConditionalGeneration",
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Cohere2ForCausalLM",
        ),
        "some of its layers see a sliding window",
    ),
    **dict.fromkeys(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), "most of its layers see the chunk that they are in"
    ),
    "GptOssForCausalLM": "its layers have attention sinks, and some see a sliding window",
    **dict.fromkeys(
        (
            "Qwen3NextForCausalLM",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "MiniMaxForCausalLM",
            "KimiLinearForCausalLM",
        ),
        "most of its layers are linear",
    ),
    **dict.fromkeys(
        ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MiniCPMSALAForCausalLM"),
        "its attention was trained to be sparse",
    ),
    "MiniCPMForCausalLM": "its layers are scaled, and those of MiniCPM4.1 were trained to be sparse",
    **dict.fromkeys(
        (
            "Qwen2VLForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
        ),
        "it sees images, too",
    ),
    "MllamaForConditionalGeneration": "it has layers of cross attention",
    "T5ForConditionalGeneration": "it has an encoder",
    "LongcatFlashForCausalLM": "LongCat's sharing (cli_factor) is trained in and wins over any pattern",
    **dict.fromkeys(
        ("MistralLarge3ForCausalLM", "Dots3NoteForCausalLM", "Glm5NextForConditionalGeneration"),
        "it has indexers, but patterns were never tried on it",
    ),
}
