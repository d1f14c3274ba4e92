"""Dense models with grouped-query attention: Llama, Qwen2, Qwen3 (also its MoE) and Mistral (DELTA, arXiv 2510.09883).

Nothing in them chooses, so a pattern brings along what is chosen: pages of the cache. While decoding, a `D` layer
attends to everything, and one that an `S` follows also scores the pages; `S` layers attend to the best of them. Prompts
are read as ever. Read: sglang/srt/layers/radix_attention.py and layers/attention of 0.5.17 and 0.5.23, and the four
models in transformers 5.17 and 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from sglang_indexcache.config_keys import ConfigKeys, identity, rope_facts
from sglang_indexcache.errors import ModelConfigError, SpellingError
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dense_gqa import attention
from sglang_indexcache.families.dense_gqa.backends import BACKENDS
from sglang_indexcache.families.dense_gqa.keys import KEYS, WINDOW_KEYS
from sglang_indexcache.families.dense_gqa.windows import check_layers
from sglang_indexcache.model import ModelLayers, layer_count, positive
from sglang_indexcache.overrides import FLAG
from sglang_indexcache.pattern import FULL, Pattern
from sglang_indexcache.probes import LOAD_BACKENDS, Feature, Need
from sglang_indexcache.rope import rope_parameters
from sglang_indexcache.selection import DEFAULT, TOKEN_MAX, Selection
from sglang_indexcache.steps import NO_MEMORY

_QUERIES = re.compile(r"^(?:(?!mtp|nextn|draft)\w+\.)*layers\.(\d+)\.self_attn\.(?:q_proj|qkv_proj)\.\w*weight")

_UNTRIED = "it was never tried with one on dense models"
_CHOSEN_IN_DECODING = "pages are chosen while single tokens are decoded"


class DenseGqa(Family):
    """Every layer is a site. Roles are written once SGLang has built its attention backend."""

    name = "dense_gqa"
    keys: ClassVar[Mapping[str, ConfigKeys]] = KEYS
    serving = Feature(
        "dense_gqa", "patterns of D and S on Llama, Qwen2, Qwen3 and Mistral", attention.NEEDS, "no server for these"
    )
    pipeline: ClassVar[Feature | None] = None
    variants: ClassVar[tuple[Feature, ...]] = tuple(item.feature for item in BACKENDS)
    rule: ClassVar[Feature | None] = None
    proven_after: ClassVar[Need] = LOAD_BACKENDS
    calibrated = False
    refused_flags: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "speculative_algorithm": f"{_CHOSEN_IN_DECODING}, and drafts are verified as prompts are read",
            "enable_mixed_chunk": f"{_CHOSEN_IN_DECODING}, and mixed chunks decode as prompts are read",
            "enable_pdmux": "it has an attention backend of its own for every stream",
            "enable_hisparse": "it swaps pages by a choice of its own",
            "enable_unified_memory": "its slots are not those of the page table",
            "dcp_size": "a rank would choose among its own part of the tokens",
            "attn_cp_size": "a rank would choose among its own part of the tokens",
            "enable_prefill_cp": "a rank would choose among its own part of the tokens",
            "enable_torch_compile": _UNTRIED,
            "enable_dp_attention": _UNTRIED,
            "dllm_algorithm": f"{_CHOSEN_IN_DECODING}, and diffusion models decode blocks",
        }
    )

    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        num_layers = layer_count(config, name)
        check_layers(config, name, num_layers, architecture)
        heads = positive(config, "num_attention_heads", name)
        groups = heads if config.get("num_key_value_heads") is None else positive(config, "num_key_value_heads", name)
        if heads % groups:
            raise ModelConfigError(f"{name}: config.json: {heads} heads share {groups} key heads, expected a divisor")
        return ModelLayers(
            name=name,
            architecture=architecture,
            layers=tuple(range(num_layers)),
            index_topk=DEFAULT.tokens,
            first_sparse_position=DEFAULT.tokens,
            native=Pattern.full(num_layers, selection=DEFAULT),
            **identity(architecture, self._facts(config, name, architecture), config),
        )

    def _facts(self, config: Mapping[str, Any], name: str, architecture: str) -> dict[str, Any]:
        """What changes the model, sizes that follow from others written out.

        Raises:
            ModelConfigError: if a key is not known, or of another kind.
        """
        keys = self.keys[architecture]
        facts = keys.facts(config, name)
        sizes = {**keys.defaults, **facts}
        if sizes["num_key_value_heads"] is None:
            facts["num_key_value_heads"] = sizes["num_attention_heads"]
        if sizes["head_dim"] is None:
            facts["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        lengths = {"max_position_embeddings": sizes["max_position_embeddings"]}
        return {**facts, **rope_facts(rope_parameters({**lengths, **config}, name), name)}

    def selecting(self, model: ModelLayers, selection: Selection | None) -> ModelLayers:
        return super().selecting(model, selection or DEFAULT)

    def indexer_layers(self, tensors: Iterable[str]) -> frozenset[int]:
        return frozenset(int(match[1]) for name in tensors if (match := _QUERIES.search(name)))

    def handed_over(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        self.check_overrides(overrides)
        for key in ("num_hidden_layers", *WINDOW_KEYS):
            if key in overrides:
                raise SpellingError(
                    f"{FLAG}: {key} changes which layers there are; expected a file made for that model"
                )
        if FULL in pattern.roles:
            raise SpellingError(f"letter {pattern.roles.index(FULL)} is F, which is not served yet; expected D or S")
        chosen = pattern.selection
        if chosen is not None and (chosen.score != TOKEN_MAX or chosen.steps != NO_MEMORY or chosen.buffer_pages):
            raise SpellingError(
                f"selection {chosen} is not served yet; expected score {TOKEN_MAX} without steps and buffer_pages"
            )
        return dict(overrides)

    def loaded(self, runner: Any, pattern: Pattern) -> None:
        attention.install(runner, pattern)

    def captured(self, runner: Any, pattern: Pattern) -> None:
        attention.check_captured(runner, pattern)

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        return attention.modules(model)

    def role(self, site: int, module: Any) -> str:
        return attention.role(site, module)

    def selection(self, model: Any) -> Selection | None:
        return attention.selection(model)

    def indexer(self, module: Any) -> None:
        return None

    def switch(self, runner: Any, pattern: Pattern) -> None:
        attention.switch(runner, pattern)

    def configured(self, runner: Any) -> str:
        return attention.configured(runner)

    def selectors(self, model: Any) -> list[Any]:
        return [None] * len(model.model.layers)
