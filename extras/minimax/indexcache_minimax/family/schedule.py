"""Which layers of MiniMax-M3 choose blocks, and how: one form of what releases and transformers write in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.layers import positive

SPARSE = "sparse_attention_config"
_FLAT = {  # transformers' names, a release's names, and what transformers takes for their absence
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}
_KINDS = {"minimax_m3_sparse": 1, "full_attention": 0}
_EXPERTS = {"sparse": 1, "dense": 0}
_SAME = {  # of a release: what transformers' code does, whatever the key says
    "use_sparse_attention": (True, None),
    "sparse_score_type": ("max", None),
    "sparse_init_block": (0, None),
    "sparse_init_tokens": (0, None),
}


@dataclass(frozen=True, kw_only=True)
class Choosing:
    """How the layers choose.

    Attributes:
        layers: the model layers that choose blocks of keys; the others attend to everything.
        index_n_heads: index heads, each of which chooses for one key head and its query heads.
        index_head_dim: width of index queries and keys.
        index_block_size: tokens of a block.
        index_topk_blocks: blocks that a query chooses.
        index_local_blocks: of these, the newest ones that are always among them.
        experts: layers with a mixture of experts.
    """

    layers: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_block_size: int
    index_topk_blocks: int
    index_local_blocks: int
    experts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that a query attends to: up to that many it has nothing to choose."""
        return self.index_topk_blocks * self.index_block_size

    def facts(self) -> dict[str, Any]:
        """Return plain values, for the digest of a config.json."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def choosing(text: Mapping[str, Any], name: str, num_layers: int) -> Choosing:
    """Read how a model chooses.

    Args:
        text: the part of its config.json about the text model.
        name: name of the model, for people.
        num_layers: its layers.

    Raises:
        ModelConfigError: if a key is missing, wrong, or says another attention than transformers computes.
    """
    where = f"{name}: config.json: {SPARSE}"
    sparse = text.get(SPARSE)
    if sparse is not None and not isinstance(sparse, Mapping):
        raise ModelConfigError(f"{where} is {str(sparse)[:60]!r}, expected a mapping")
    numbers = _numbers(text, sparse or {}, name)
    if sparse is None:
        chooses = _by_words(text.get("layer_types"), _KINDS, "layer_types", num_layers, name)
    else:
        chooses = _by_numbers(sparse.get("sparse_attention_freq"), f"{SPARSE}.sparse_attention_freq", num_layers, name)
        for key, allowed in _SAME.items():
            if sparse.get(key) not in allowed:
                raise ModelConfigError(f"{where}.{key} is {sparse[key]!r}, expected {allowed[0]!r}")
        without = _by_numbers(
            sparse.get("sparse_disable_index_value"), f"{SPARSE}.sparse_disable_index_value", num_layers, name
        )
        valued = next((layer for layer in range(num_layers) if chooses[layer] and not without[layer]), None)
        if valued is not None:
            raise ModelConfigError(
                f"{where}.sparse_disable_index_value is 0 for layer {valued}, whose index has values of its own and"
                " can't be shared; expected 1 for every layer that chooses"
            )
    layers = tuple(layer for layer in range(num_layers) if chooses[layer])
    if not layers:
        raise ModelConfigError(f"{name}: config.json: no layer chooses blocks, so none has an index")
    groups = positive(text, "num_key_value_heads", name) if "num_key_value_heads" in text else 4
    if numbers["index_n_heads"] != groups:
        raise ModelConfigError(
            f"{name}: config.json: {numbers['index_n_heads']} index heads choose for {groups} key heads, expected as"
            " many: SGLang joins the choices of several, transformers does not"
        )
    if numbers["index_local_blocks"] > numbers["index_topk_blocks"]:
        raise ModelConfigError(
            f"{name}: config.json: {numbers['index_local_blocks']} local blocks don't fit into"
            f" {numbers['index_topk_blocks']} that are chosen; expected fewer"
        )
    return Choosing(layers=layers, experts=_experts(text, num_layers, name), **numbers)


def _numbers(text: Mapping[str, Any], sparse: Mapping[str, Any], name: str) -> dict[str, int]:
    """Return the sizes of the index; a release's word wins over transformers', as in its configuration class."""
    found = {}
    for flat, (released, default) in _FLAT.items():
        given = {key: of[key] for of, key in ((sparse, released), (text, flat)) if of.get(key) is not None}
        value = next(iter(given.values()), default)
        least = 0 if flat == "index_local_blocks" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelConfigError(
                f"{name}: config.json: {next(iter(given))} is {value!r}, expected a number of {least} or more"
            )
        if len(set(given.values())) > 1:
            both = " and ".join(f"{key} is {item!r}" for key, item in given.items())
            raise ModelConfigError(f"{name}: config.json: {both}, which are one and the same; expected one value")
        found[flat] = value
    return found


def _experts(text: Mapping[str, Any], num_layers: int, name: str) -> tuple[int, ...]:
    """Return the layers with experts; all of them if nothing is said."""
    if text.get("moe_layer_freq") is not None:
        mixed: Sequence[int] = _by_numbers(text["moe_layer_freq"], "moe_layer_freq", num_layers, name)
    elif text.get("mlp_layer_types") is not None:
        mixed = _by_words(text["mlp_layer_types"], _EXPERTS, "mlp_layer_types", num_layers, name)
    else:
        mixed = [1] * num_layers
    return tuple(layer for layer in range(num_layers) if mixed[layer])


def _by_numbers(value: Any, key: str, num_layers: int, name: str) -> list[int]:
    if not isinstance(value, list) or len(value) != num_layers or any(item not in (0, 1) for item in value):
        raise ModelConfigError(
            f"{name}: config.json: {key} is {str(value)[:60]}, expected 0 or 1 for each of {num_layers} layers"
        )
    return [int(item) for item in value]


def _by_words(value: Any, words: Mapping[str, int], key: str, num_layers: int, name: str) -> list[int]:
    if not isinstance(value, list) or len(value) != num_layers or any(item not in words for item in value):
        raise ModelConfigError(
            f"{name}: config.json: {key} is {str(value)[:60]}, expected {' or '.join(words)} for each of {num_layers}"
            " layers"
        )
    return [words[item] for item in value]
