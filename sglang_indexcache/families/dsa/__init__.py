"""DeepSeek Sparse Attention with one lightning indexer a layer: DeepSeek-V3.2, GLM-5, 5.1, 5.2 and 5.3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from sglang_indexcache.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.errors import ModelConfigError, SpellingError
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dsa import attention, needs
from sglang_indexcache.families.dsa.keys import KEYS
from sglang_indexcache.families.dsa.modeling import attentions
from sglang_indexcache.families.dsa.overrides import merge_overrides
from sglang_indexcache.families.dsa.rule import RULE_FEATURE, effective_pattern
from sglang_indexcache.families.dsa.schedule import check_layer_types, expert_layers
from sglang_indexcache.families.dsa.spellings import PATTERN_KEY, Rule, read_spelling
from sglang_indexcache.indexers import IndexerSetting
from sglang_indexcache.model import ModelLayers, layer_count, positive
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.probes import Feature, SglangSource
from sglang_indexcache.rope import rope_parameters

if TYPE_CHECKING:
    from torch import Tensor

_UNTRIED = "layers that select for blocks of queries were never tried with it"
_INDEXER_WEIGHT = re.compile(r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.(?:self_attn|attn|attention)\.indexer\.")


class Dsa(Family):
    """Every layer is a site. SGLang reads the pattern from its configuration while it builds the model."""

    name = "dsa"
    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS
    serving = Feature("dsa", "patterns of F and S on DeepSeek-V3.2 and GLM-5", attention.NEEDS, "no server for these")
    pipeline: ClassVar[Feature | None] = Feature(
        "pipeline",
        "pipeline stages that begin with an S layer",
        (attention.STAGES,),
        "no server with pipeline parallelism",
    )
    rule: ClassVar[Feature | None] = RULE_FEATURE
    told: ClassVar[Feature | None] = needs.POSITIONS
    blocks: ClassVar[Feature | None] = needs.BLOCKS
    refused_with_blocks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "enable_prefill_cp": _UNTRIED,
            "enable_prefill_context_parallel": _UNTRIED,
            "enable_dsa_prefill_context_parallel": _UNTRIED,
            "attn_cp_size": _UNTRIED,
            "dcp_size": _UNTRIED,
            "enable_hisparse": _UNTRIED,
        }
    )

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        num_layers = layer_count(config, name)
        try:
            native = self.native(config, num_layers)
        except SpellingError as error:
            raise ModelConfigError(f"{name}: config.json: {error}") from None
        index_topk = positive(config, "index_topk", name)
        return ModelLayers(
            name=name,
            architecture=architecture,
            layers=tuple(range(num_layers)),
            index_topk=index_topk,
            first_sparse_position=index_topk,
            native=native,
            **identity(architecture, self._facts(config, name, architecture, native), config),
        )

    def _facts(self, config: Mapping[str, Any], name: str, architecture: str, native: Pattern) -> dict[str, Any]:
        """What changes the model, the schedules of its layers in the one form that they are compared in.

        Raises:
            ModelConfigError: if a key is not known, or says what these models don't have.
        """
        keys = self.keys[architecture]
        facts = keys.facts(config, name)
        num_layers = len(native)
        check_layer_types(config, name)
        dense = {**keys.defaults, **facts}.get("first_k_dense_replace", 1)
        experts = config.get("mlp_layer_types")
        if experts is not None and experts[:num_layers] != expert_layers(num_layers, dense):
            facts["mlp_layer_types"] = experts[:num_layers]
        if native.shared_layers:
            facts[PATTERN_KEY] = native.roles
        lengths = {"max_position_embeddings": keys.defaults["max_position_embeddings"]}
        return {**facts, **rope_facts(rope_parameters({**lengths, **config}, name), name)}

    def native(self, config: Mapping[str, Any], num_layers: int) -> Pattern:
        """The pattern that a config.json declares; all `F` where it says nothing.

        Raises:
            SpellingError: if it can't be told.
        """
        return read_spelling(config, num_layers, Rule.SGLANG_TYPES_FIRST).pattern

    def indexer_layers(self, tensors: Iterable[str]) -> frozenset[int]:
        return frozenset(int(match[1]) for name in tensors if (match := _INDEXER_WEIGHT.search(name)))

    def handed_over(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        self.check_overrides(overrides)
        self.needed(pattern)
        return merge_overrides(overrides, pattern.plain())

    def loaded(self, runner: Any, pattern: Pattern) -> None:
        if pattern.indexers:
            from sglang_indexcache.families.dsa import patch_indexers

            patch_indexers.install(attention.modules(runner.model), pattern)

    def would_run(self, source: SglangSource, model: str, overrides: Mapping[str, Any], letters: int) -> Pattern:
        return effective_pattern(source, model, overrides, letters)

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        return attention.modules(model)

    def role(self, site: int, module: Any) -> str:
        return attention.role(site, module)

    def indexers(self, model: Any) -> tuple[IndexerSetting, ...]:
        from sglang_indexcache.families.dsa import patch_indexers

        return tuple(patch_indexers.installed(attention.modules(model)))

    def indexer(self, module: Any) -> Any:
        return getattr(module, "indexer", None)

    def switch(self, runner: Any, pattern: Pattern) -> None:
        attention.switch(runner, pattern)

    def positions(self, forward_batch: Any, site: int, selected: Tensor, rows: Tensor, requests: Tensor) -> Tensor:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        from sglang_indexcache.families.dsa.index_space import positions_of

        return positions_of(get_attn_backend().get_indexer_metadata(site, forward_batch), selected, rows, requests)

    def configured(self, runner: Any) -> str:
        return attention.configured(runner)

    def selectors(self, model: Any) -> list[Any]:
        return [module.indexer for module in attentions(model)]
