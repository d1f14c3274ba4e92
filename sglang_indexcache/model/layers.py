"""The facts about a model before it is loaded: its layers that select what to attend to, and a digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.pattern import Pattern

MOST_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class ModelLayers:
    """A model whose layers select what they attend to; `families.describe` reads it from a config.json.

    Attributes:
        name: the folder's name or the hub id that it came from.
        architecture: as in config.json; `families.family_of` knows its family.
        layers: the model layer that each letter of a pattern stands for; NextN/MTP layers have none.
        index_topk: tokens that each query selects; of dense models, for the selection of `native`.
        first_sparse_position: position of the first query that selects; up to there every pattern gives the same
            output.
        native: the checkpoint's own pattern; nothing is shared unless it was trained so.
        config_sha256: digest of `config`, see `config_keys.facts_digest`.
        config: values of config.json that differ from its architecture's defaults and change the model.
        earlier_sha256: digest of config.json itself, as in earlier pattern files.
        redundant: keys of config.json with the value that their absence means, or without effect on the model.
    """

    name: str
    architecture: str
    layers: tuple[int, ...]
    index_topk: int
    first_sparse_position: int
    native: Pattern
    config_sha256: str
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    earlier_sha256: str = field(default="", compare=False)
    redundant: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        """Number of layers that can select: the letters of a pattern."""
        return len(self.layers)

    @property
    def dense(self) -> bool:
        """True if its layers attend to everything, so that a pattern brings a selection."""
        return self.native.dense

    @property
    def locked(self) -> tuple[int, ...]:
        """Letters that are shared in the checkpoint: without indexer weights, they can't become `F`."""
        return self.native.shared_layers


def positive(config: Mapping[str, Any], key: str, name: str) -> int:
    """Return the positive integer under `key` of a config.json.

    Raises:
        ModelConfigError: if there is none.
    """
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelConfigError(f"{name}: config.json: {key} is {value!r}, expected a positive integer")
    return value


def layer_count(config: Mapping[str, Any], name: str) -> int:
    """Return `num_hidden_layers` of a config.json.

    Raises:
        ModelConfigError: if it is no positive integer, or too large to be meant.
    """
    num_layers = positive(config, "num_hidden_layers", name)
    if num_layers > MOST_LAYERS:
        raise ModelConfigError(f"{name}: config.json: {num_layers} layers, expected at most {MOST_LAYERS}")
    return num_layers
