"""DeepSeek-V4: compressed sparse attention, whose layers choose among entries of four tokens each.

Only some layers have an indexer: those with compression ratio 4 ("C4" in SGLang, "CSA" in transformers), every second
one. A pattern has one letter for each of them, as vLLM's docs write it. All of them write their choice into one buffer
of the forward pass, so a layer that does not run its indexer attends to what the last one chose: nothing is carried,
and no configuration is read. Read: sglang/srt/models/deepseek_v4.py and layers/attention/dsv4 of 0.5.17 and 0.5.23;
transformers/models/deepseek_v4 of 5.17 and 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from sglang_indexcache.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.errors import ModelConfigError, SpellingError
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.deepseek_v4 import indexer
from sglang_indexcache.families.deepseek_v4.keys import DEFAULT_HASH_LAYERS, KEYS
from sglang_indexcache.families.deepseek_v4.schedule import (
    CHOOSING_RATIO,
    compression_ratios,
    hash_layers,
    rotary,
)
from sglang_indexcache.model import ModelLayers, positive
from sglang_indexcache.overrides import FLAG
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.probes import Feature

_INDEXER_WEIGHT = re.compile(
    r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.(?:attn|self_attn|self_attn\.compressor)\.indexer\."
)
_SCHEDULE_KEYS = ("compress_ratios", "compress_rates", "layer_types", "num_hidden_layers", "index_topk")
_SHARING_KEYS = ("index_topk_pattern", "index_topk_freq", "indexer_types")
_OWN_SWAPS = "its buffer holds slots of one layer, which S layers can't use"
_UNTRIED = "context parallelism was never tried with one on DeepSeek-V4"


class DeepseekV4(Family):
    """The layers with compression ratio 4 are the sites. Roles are written once the model is loaded."""

    name = "deepseek_v4"
    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS
    serving = Feature("deepseek_v4", "patterns of F and S on DeepSeek-V4", indexer.NEEDS, "no server for DeepSeek-V4")
    pipeline: ClassVar[Feature | None] = Feature(
        "pipeline (V4)",
        "pipeline stages of DeepSeek-V4, each beginning with an F",
        (indexer.STAGES,),
        "no server with pipeline parallelism",
    )
    rule: ClassVar[Feature | None] = None
    begins_every_stage = True
    on_kernels = False
    refused_flags: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "enable_hisparse": _OWN_SWAPS,
            "enable_return_indexer_topk": "S layers have no indices of their own to return",
            "enable_prefill_cp": _UNTRIED,
            "attn_cp_size": _UNTRIED,
            "dcp_size": _UNTRIED,
        }
    )

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        ratios = compression_ratios(config, name)
        layers = tuple(layer for layer, ratio in enumerate(ratios) if ratio == CHOOSING_RATIO)
        if not layers:
            raise ModelConfigError(f"{name}: config.json: no layer has compression ratio 4, so none has an indexer")
        index_topk = positive(config, "index_topk", name)
        return ModelLayers(
            name=name,
            architecture=architecture,
            layers=layers,
            index_topk=index_topk,
            first_sparse_position=CHOOSING_RATIO * index_topk,
            native=Pattern.full(len(layers)),
            **identity(architecture, self._facts(config, name, architecture, ratios), config),
        )

    def _facts(
        self, config: Mapping[str, Any], name: str, architecture: str, ratios: tuple[int, ...]
    ) -> dict[str, Any]:
        """What changes the model, schedules and rotary parameters in the one form that they are compared in.

        Raises:
            ModelConfigError: if a key is not known, or of another kind.
        """
        facts = {**self.keys[architecture].facts(config, name), "compress_ratios": list(ratios)}
        hashed = hash_layers(config, len(ratios), name)
        if hashed != DEFAULT_HASH_LAYERS:
            facts["num_hash_layers"] = hashed
        for kind, rope in rotary(config, name).items():
            facts |= rope_facts(rope, name, f"rope_parameters.{kind}")
        return facts

    def indexer_layers(self, tensors: Iterable[str]) -> frozenset[int]:
        return frozenset(int(match[1]) for name in tensors if (match := _INDEXER_WEIGHT.search(name)))

    def handed_over(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        pattern.check_plain("is not served yet")
        for key in _SCHEDULE_KEYS:
            if key in overrides:
                raise SpellingError(f"{FLAG}: {key} changes which layers choose; expected a file made for that model")
        for key in _SHARING_KEYS:
            if key in overrides:
                raise SpellingError(f"{FLAG}: {key} is not read on DeepSeek-V4; expected the pattern file alone")
        self.check_overrides(overrides)
        return dict(overrides)

    def loaded(self, runner: Any, pattern: Pattern) -> None:
        self.switch(runner, pattern)

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        return indexer.modules(model)

    def role(self, site: int, module: Any) -> str:
        return indexer.role(site, module)

    def indexer(self, module: Any) -> Any:
        return module

    def switch(self, runner: Any, pattern: Pattern) -> None:
        indexer.switch(runner, pattern)

    def configured(self, runner: Any) -> str:
        return indexer.configured(runner)

    def selectors(self, model: Any) -> list[Any]:
        attentions = (layer.self_attn for layer in model.model.layers)
        indexers = (getattr(attention.compressor, "indexer", None) for attention in attentions)
        return [selector for selector in indexers if selector is not None]
