"""Test only: real SGLang runs DSA models on a CPU. Imports nothing heavy before SGLang asks for it."""


def activate() -> str:
    """Entry point of `sglang.srt.platforms`: where the platform class is."""
    return "dsa_cpu_platform.platform.DsaCpuPlatform"


def register() -> None:
    """Entry point of `sglang.srt.plugins`: replace what needs a GPU, and break what a test asks for."""
    from dsa_cpu_platform import hooks, sabotage

    hooks.register_hooks()
    sabotage.apply()
