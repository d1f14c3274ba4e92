"""config.json of a released NOSA or MiniCPM4 (InfLLM-V2) checkpoint, as that of a plain Llama and a selection.

Read, not run: `modeling_llama_nosa.py` and `nosi/` of thunlp/NOSA at 94d5f75 (names of tensors, sizes of the selection,
which are constants there); SGLang 0.5.23, `models/minicpm.py` and `layers/attention/minicpm/backend.py` (the three
scales, `sparse_config`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import BY_KEY_HEAD, CHUNK, COMPRESSED_KEYS, STRIDE, Selection
from indexcache_search.errors import SearchError
from sglang_indexcache.io.errors import PatternError

NOSA, MINICPM = "SparseLlamaForCausalLM", "MiniCPMForCausalLM"
_MODEL_TYPES = {NOSA: "llama", MINICPM: "minicpm"}
_NOSAS = Selection(
    page_tokens=64,
    pages=64,
    recent_pages=16,
    sink_pages=1,
    score=COMPRESSED_KEYS,
    heads=BY_KEY_HEAD,
    steps=ReusePolicy(policy="nosa", query_pages=16, importance="heads"),
)
_KEPT = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "attention_bias", "attention_dropout", "mlp_bias", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "use_cache"),
)
_MOST = 1 << 20


@dataclass(frozen=True)
class Released:
    """A released checkpoint, described as a plain Llama.

    Attributes:
        config: config.json of the plain Llama.
        selection: how its layers select.
        heads: whether it has eviction heads, the tensors `A` and `delta.weight` of each layer.
        embedding: factor of embeddings.
        residual: factor of what attention and MLP add.
        logits: factor of the logits.
    """

    config: Mapping[str, Any]
    selection: Selection
    heads: bool
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0

    @classmethod
    def read(cls, config: Mapping[str, Any], name: str) -> Self:
        """Read the contents of a config.json.

        Raises:
            SearchError: if it is of another model, or says what is not supported.
        """
        architectures = config.get("architectures")
        architecture = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
        if architecture not in (NOSA, MINICPM):
            raise _wrong(name, "architectures", architectures, f"[{NOSA}] or [{MINICPM}]")
        if config.get("model_type") != _MODEL_TYPES[architecture]:
            raise _wrong(name, "model_type", config.get("model_type"), _MODEL_TYPES[architecture])
        for key, usual in (("attention_bias", False), ("pretraining_tp", 1), ("quantization_config", None)):
            if config.get(key, usual) != usual:
                raise _wrong(name, key, config[key], str(usual).lower())
        kept = {key: config[key] for key in _KEPT if key in config}
        plain = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **kept}
        layers, width = (_number(config, key, name, 1) for key in ("num_hidden_layers", "hidden_size"))
        if architecture == NOSA:
            return cls(plain, _NOSAS, heads=True)
        base = _number(config, "dim_model_base", name, 1, width)
        return cls(
            {**plain, "tie_word_embeddings": False},
            _infllm(config, name),
            heads=False,
            embedding=_factor(config, "scale_emb", name),
            residual=_factor(config, "scale_depth", name) / math.sqrt(layers),
            logits=base / width,
        )


def _infllm(config: Mapping[str, Any], name: str) -> Selection:
    """Return the selection of `sparse_config`: `topk` pages are selected beside the window."""
    sparse = config.get("sparse_config")
    if not isinstance(sparse, dict):
        raise _wrong(name, "sparse_config", sparse, "the sizes of InfLLM-V2")
    for key, only in (("kernel_size", CHUNK), ("kernel_stride", STRIDE), ("use_nope", False)):
        if type(sparse.get(key)) is not type(only) or sparse[key] != only:
            raise _wrong(name, f"sparse_config.{key}", sparse.get(key), str(only).lower())
    of = "sparse_config."
    size = _number(sparse, "block_size", name, 1, of=of)
    window = _number(sparse, "window_size", name, size, of=of)
    sinks, topk = _number(sparse, "init_blocks", name, 0, of=of), _number(sparse, "topk", name, 1, of=of)
    if window % size:
        raise _wrong(name, "sparse_config.window_size", window, f"a multiple of block_size, {size}")
    try:
        return Selection(
            page_tokens=size,
            pages=topk + window // size,
            recent_pages=window // size,
            sink_pages=sinks,
            score=COMPRESSED_KEYS,
            heads=BY_KEY_HEAD,
        )
    except PatternError as error:
        raise SearchError(f"{name}: config.json: sparse_config: {error}") from None


def _number(config: Mapping[str, Any], key: str, name: str, least: int, most: int = _MOST, *, of: str = "") -> int:
    value = config.get(key)
    if type(value) is not int or not least <= value <= most:
        raise _wrong(name, of + key, value, f"{least} to {most}")
    return value


def _factor(config: Mapping[str, Any], key: str, name: str) -> float:
    value = config.get(key)
    if type(value) not in (int, float) or not 0 < value < _MOST:  # type: ignore[operator]
        raise _wrong(name, key, value, "a positive number")
    return float(value)  # type: ignore[arg-type]


def _wrong(name: str, key: str, value: object, expected: str) -> SearchError:
    return SearchError(f"{name}: config.json: {key} is {repr(value)[:80]}, expected {expected}")
