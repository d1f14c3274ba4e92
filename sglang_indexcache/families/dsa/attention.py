"""SGLang's DSA attention modules: what each would do, and how it is made to do something else.

`DeepseekV2AttentionMLA` decides while it is built: `skip_topk` says whether its indexer stays quiet, `next_skip_topk`
whether its indices are handed to the layer above. Read: sglang/srt/models/deepseek_v2.py of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dsa.spellings import FREQ_KEY, PATTERN_KEY, TYPES_KEY, to_sglang
from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.probes import Need

ATTENTION = Need(
    "srt.models.deepseek_v2", "DeepseekV2AttentionMLA.__init__", ("layer_id",), ("skip_topk", "next_skip_topk")
)
ROLE_READER = Need(
    "srt.models.deepseek_common.attention_forward_methods.forward_mla",
    "DeepseekMLAForwardMixin",
    mentions=("skip_topk",),
)
STAGES = Need("srt.models.deepseek_v2", "DeepseekV2Model.forward", ("pp_proxy_tensors",), ("topk_indices",))
NEEDS = (ATTENTION, ROLE_READER)


def modules(model: Any) -> Iterator[tuple[int, Any]]:
    """The DSA attention modules of a model by layer; NextN modules always run their own indexer and are left out."""
    for module in model.modules():
        shares = getattr(module, "skip_topk", None) is not None and hasattr(module, "next_skip_topk")
        if shares and not getattr(module, "is_nextn", False):
            yield module.layer_id, module


def role(layer: int, module: Any) -> str:
    """What the module would do: SGLang's own decision where it has one (0.5.15 and newer), else what it reads.

    Raises:
        ProofError: if the two differ.
    """
    decide = getattr(module, "should_run_indexer", None)
    runs = not module.skip_topk if decide is None else bool(decide(object()))  # with indices carried to it
    if runs != (not module.skip_topk):
        raise ProofError(f"layer {layer} decides by something else than skip_topk whether its indexer runs")
    return FULL if runs else SHARED


def switch(runner: Any, pattern: Pattern) -> None:
    """Write the roles of this rank's layers, and the configuration that pipeline stages ask."""
    for layer, module in modules(runner.model):
        module.skip_topk = pattern[layer] == SHARED
        module.next_skip_topk = layer + 1 < len(pattern) and pattern[layer + 1] == SHARED
    config = runner.model_config.hf_config
    for key, value in to_sglang(pattern).items():
        if key != TYPES_KEY or getattr(config, TYPES_KEY, None) is not None:
            setattr(config, key, value)


def configured(runner: Any) -> str:
    """The letters that the configuration says; empty where a freq says something else."""
    config = runner.model_config.hf_config
    return str(getattr(config, PATTERN_KEY)) if getattr(config, FREQ_KEY) == 1 else ""
