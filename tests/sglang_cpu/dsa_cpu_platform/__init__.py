"""Test only: real SGLang runs DSA models on a CPU. Imports nothing heavy before SGLang asks for it."""

import os

# Compiling small CPU functions takes longer than running them; fused top-k hands out slots instead of positions.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("SGLANG_DSA_FUSE_TOPK", "0")
# Of DeepSeek-V4, the ways that need no kernels.
os.environ.setdefault("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
for _name in (
    *("SGLANG_OPT_USE_TOPK_V2", "SGLANG_OPT_USE_TILELANG_MHC_PRE", "SGLANG_OPT_USE_TILELANG_MHC_POST"),
    *("SGLANG_OPT_USE_FUSED_HASH_TOPK", "SGLANG_OPT_DEEPGEMM_HC_PRENORM", "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"),
    *("SGLANG_OPT_FP8_WO_A_GEMM", "SGLANG_DSV4_FP4_EXPERTS"),
):
    os.environ.setdefault(_name, "0")


def activate() -> str:
    """Entry point of `sglang.srt.platforms`: where the platform class is."""
    return "dsa_cpu_platform.platform.DsaCpuPlatform"


def register() -> None:
    """Entry point of `sglang.srt.plugins`: replace what needs a GPU, and break what a test asks for."""
    from dsa_cpu_platform import flash_attention, hooks, sabotage, trtllm

    hooks.register_hooks()
    flash_attention.install()
    trtllm.install()
    sabotage.apply()
