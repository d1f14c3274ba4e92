"""Test only: real SGLang runs DSA models on a CPU. Imports nothing heavy before SGLang asks for it."""

import os

# Compiling small CPU functions takes longer than running them; fused top-k hands out slots instead of positions.
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
os.environ.setdefault("SGLANG_DSA_FUSE_TOPK", "0")


def activate() -> str:
    """Entry point of `sglang.srt.platforms`: where the platform class is."""
    return "dsa_cpu_platform.platform.DsaCpuPlatform"


def register() -> None:
    """Entry point of `sglang.srt.plugins`: replace what needs a GPU, and break what a test asks for."""
    from dsa_cpu_platform import hooks, sabotage

    hooks.register_hooks()
    sabotage.apply()
