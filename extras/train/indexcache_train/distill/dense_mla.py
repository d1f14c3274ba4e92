"""Make the config.json of a DSA model from that of a dense model with latent attention (MLA).

A model is refused unless the DSA architecture has all its other parts, in transformers and in SGLang. So the outputs
are the dense model's for as long as a query sees no more than `index_topk` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import read_config
from indexcache_train.distill.settings import DEEPSEEK, DENSE_MLA, GLM, IndexerSize, dense_architecture
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.checkpoint import checkpoint
from sglang_indexcache.families import describe
from sglang_indexcache.families.dsa.keys import KEYS
from sglang_indexcache.families.dsa.override import to_sglang

_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}  # that of DSA models
_ONLY = {"attention_bias": False, "mlp_bias": False, "rope_interleave": True, "hidden_act": "silu"}
_DROPPED = ("auto_map", "head_dim", "qk_head_dim", "layer_types", "num_mtp_layers")  # derived, or of the dense model


@dataclass(frozen=True, kw_only=True)
class DenseStart:
    """A dense model that is about to get indexers.

    Attributes:
        size: of the indexers.
        name: of the model, for people.
        config: config.json of the DSA model that it becomes.
    """

    size: IndexerSize
    name: str
    config: Mapping[str, Any]

    @classmethod
    def read(cls, model: str, size: IndexerSize) -> DenseStart | None:
        """Read the config.json of a folder or hub id; None if it is of no dense model with MLA.

        Raises:
            ModelConfigError: if there is no config.json.
            SearchError: if DSA has no place for a part of the model, or the indexers do not fit it.
        """
        config, name = checkpoint.read_config(model)
        architecture = dense_architecture(config)
        if architecture is None:
            return None
        return cls(size=size, name=name, config=_dsa_config(config, read_config(model), name, architecture, size))

    @property
    def description(self) -> ModelLayers:
        """Layers of the DSA model."""
        return describe(self.config, self.name)

    @property
    def pretrained_config(self) -> PreTrainedConfig:
        """Configuration of transformers for it."""
        config: PreTrainedConfig = AutoConfig.for_model(**self.config)
        return config

    @property
    def all_layers(self) -> bool:
        """True if every layer has an indexer whatever the pattern: transformers knows no other DeepSeek-V3.2."""
        return bool(self.config["architectures"] == [DEEPSEEK])

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self.size)

    def made_for(self, pattern: Pattern) -> DenseStart:
        """Return it with indexers in the F layers of `pattern` alone, where the architecture can be without others."""
        if self.all_layers or not pattern.shared_layers:
            return self
        return DenseStart(size=self.size, name=self.name, config={**self.config, **to_sglang(pattern)})


def _dsa_config(
    given: Mapping[str, Any], parsed: PreTrainedConfig, name: str, architecture: str, size: IndexerSize
) -> dict[str, Any]:
    """Return the config.json of the DSA model.

    Everything that DSA reads is written out, since the architectures' defaults differ. Other keys stay as they are.
    """
    layers: int = parsed.num_hidden_layers
    dense = _dense_layers(parsed, layers, name)
    _check_parts(given, parsed, name, experts=dense < layers)
    if size.dim < parsed.qk_rope_head_dim:
        raise SearchError(
            f"--index-dim is {size.dim}, expected at least {parsed.qk_rope_head_dim}, the qk_rope_head_dim of {name}"
        )
    target = DENSE_MLA[architecture]
    keys = KEYS[target]
    read = {key: getattr(parsed, key) for key in keys.defaults if getattr(parsed, key, None) is not None}
    rope = (
        {}
        if given.get("rope_parameters") or "rope_theta" in given
        else {"rope_theta": parsed.rope_parameters["rope_theta"]}
    )
    return {
        **{key: value for key, value in given.items() if key not in _DROPPED},
        **{key: value for key, value in read.items() if key not in keys.aliases},
        **rope,
        **_ROUTER,
        "n_group": parsed.n_group or 1,  # None in models without experts
        "topk_group": parsed.topk_group or 1,
        "num_experts_per_tok": parsed.num_experts_per_tok or 1,
        "architectures": [target],
        "model_type": keys.model_type,
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "num_nextn_predict_layers": 0,
        "index_n_heads": size.heads,
        "index_head_dim": size.dim,
        "index_topk": size.topk,
        "rope_interleave": True,
        "indexer_rope_interleave": target == GLM,
    }


def _dense_layers(parsed: PreTrainedConfig, layers: int, name: str) -> int:
    """Return the number of layers before the first with experts.

    Raises:
        SearchError: if a layer after that has none.
    """
    kinds = getattr(parsed, "mlp_layer_types", None)
    if kinds is None:
        return min(int(parsed.first_k_dense_replace), layers)
    dense = kinds[:layers].index("sparse") if "sparse" in kinds[:layers] else layers
    if "dense" in kinds[dense:layers]:
        raise SearchError(
            f"{name}: config.json: mlp_layer_types has layers without experts behind layer {dense}, expected them first"
        )
    return dense


def _check_parts(given: Mapping[str, Any], parsed: PreTrainedConfig, name: str, experts: bool) -> None:
    """Refuse what DSA models have no place for.

    Raises:
        SearchError: naming the key of config.json.
    """
    where = f"{name}: config.json"
    if given.get("index_topk") is not None:
        raise SearchError(
            f"{where}: index_topk is {given['index_topk']}, so it has indexers; expected a dense model, or"
            f" architectures {DEEPSEEK}"
        )
    if parsed.q_lora_rank is None:
        raise SearchError(
            f"{where}: q_lora_rank is None, expected a number: indexers of DSA read the latent of queries"
        )
    for key, right in _ONLY.items():
        found = getattr(parsed, key, None)
        if found is not None and found != right:
            raise SearchError(f"{where}: {key} is {found!r}, expected {right!r}, all that DSA models have")
    if not experts:
        return
    if parsed.model_type == "deepseek_v2":
        found = given.get("scoring_func", "softmax")
        raise SearchError(
            f"{where}: its experts are chosen by {found} without a correction bias, expected DeepSeek-V3's sigmoid, all"
            " that DSA models have"
        )
    for key, right in _ROUTER.items():
        if given.get(key, right) != right:
            raise SearchError(f"{where}: {key} is {given[key]!r}, expected {right!r}, all that DSA models have")
