"""HY-V4 (Hy4-preview): the attention of DSA, trained with one indexer in four.

SGLang's `HYV4Attention` is a `DeepseekV2AttentionMLA`, so roles, weights, switching and blocks of prompt queries are
those of DSA; with its attention sinks, the queries of a block attend one by one. Its configuration class fills in the
schedule that a config.json leaves out, and there are no pipeline stages. Read: sglang/srt/configs/hy_v4.py and
srt/models/hunyuan_v4.py of 0.5.23; transformers/models/hy_v4 of 5.19 and 5.23. For rotary embeddings on pairs: SGLang
and vLLM 0.33, github.com/local-inference-lab/rtx6kpro/issues/90.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dsa.blocks.adapter import BlocksAdapter
from sglang_indexcache.families.dsa.checkpoint import DsaCheckpoint
from sglang_indexcache.families.dsa.needs import ATTENTIONS
from sglang_indexcache.families.dsa.override import TYPES_KEY, freq_pattern
from sglang_indexcache.families.dsa.transformers import DsaTransformers
from sglang_indexcache.families.hy_v4.keys import KEYS
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.sglang.probes import Feature, Need

FREQ = 4  # of the schedule that configuration classes of HY-V4 fill in
MODEL = Need("srt.models.hunyuan_v4", "HYV4Attention")


class HyV4Checkpoint(DsaCheckpoint):
    """A reader of checkpoints whose layers 0, 1, 5, 9, ... have an indexer; the others are locked."""

    keys = KEYS

    def native(self, config: Mapping[str, Any], num_layers: int) -> Pattern:
        """See `DsaCheckpoint.native`; the freq is `FREQ` without `indexer_types`."""
        if config.get(TYPES_KEY) is not None:
            return super().native(config, num_layers)
        return freq_pattern(num_layers, FREQ)


class HyV4Sglang(BlocksAdapter):
    """An adapter that serves HY-V4 as DSA."""

    serving = Feature("hy_v4", "patterns of F and S on HY-V4", (MODEL, *ATTENTIONS), "no server for HY-V4")
    grouping = None  # `attn_sink` is a part of each query's softmax


class HyV4Transformers(DsaTransformers):
    """An adapter that refuses HY-V4, which transformers computes in another way."""

    not_in_transformers = (
        "transformers 5.15 to 5.24 rotates halves of its rotary dimensions, where the checkpoint was trained on pairs"
    )


_CHECKPOINT = HyV4Checkpoint()
HY_V4 = Family("hy_v4", _CHECKPOINT, HyV4Sglang(_CHECKPOINT), HyV4Transformers())
