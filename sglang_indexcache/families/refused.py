"""Architectures that people try, and why patterns are not for them."""

from __future__ import annotations

_REASONS = {
    "its latent attention (MLA) is dense; indexcache-distill trains indexers for it": """
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
    "its attention was trained to be sparse": """
        MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration MiniCPMSALAForCausalLM
    """,
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
