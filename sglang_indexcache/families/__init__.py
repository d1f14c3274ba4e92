"""The families of models that can be searched and served.

A new one is a folder here with its three parts (see `base.Family`), and a name in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_indexcache.errors import ModelConfigError
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.dense_gqa import DENSE_GQA
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.hy_v4 import HY_V4
from sglang_indexcache.families.refused import REFUSED
from sglang_indexcache.model.layers import ModelLayers

FAMILIES: tuple[Family, ...] = (DSA, HY_V4, DEEPSEEK_V4, DENSE_GQA)

_BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.checkpoint.keys}


def family_of(architecture: str) -> Family:
    """Find the family of an architecture, as in config.json.

    Raises:
        ModelConfigError: if there is none.
    """
    family = _BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise ModelConfigError(f"{architecture} has no attention known here, expected {_known()}")
    return family


def family_of_modules(model: object) -> Family:
    """Find the family of a transformers model, by its class or one that it is derived from.

    Raises:
        ModelConfigError: if there is none.
    """
    names = [item.__name__ for item in type(model).__mro__]
    return family_of(next((name for name in names if name in _BY_ARCHITECTURE), names[0]))


def describe(config: Mapping[str, Any], name: str) -> ModelLayers:
    """Describe a model's layers from a parsed config.json.

    Args:
        config: its content.
        name: name of the model, for people.

    Raises:
        ModelConfigError: if its architecture is of no family, or a needed key is missing or wrong.
    """
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelConfigError(f"{name}: config.json: architectures is {architectures!r}, expected a list")
    architecture = next((item for item in _BY_ARCHITECTURE if item in architectures), None)
    if architecture is not None:
        return _BY_ARCHITECTURE[architecture].checkpoint.describe(config, name, architecture)
    reason = next((REFUSED[item] for item in map(str, architectures) if item in REFUSED), None)
    if reason is not None:
        raise ModelConfigError(f"{name}: {reason}; expected {_known()}")
    listed = ", ".join(map(str, architectures)) or config.get("model_type", "no architecture")
    raise ModelConfigError(f"{name}: {listed} has no attention known here, expected {_known()}")


def _known() -> str:
    return " or ".join(_BY_ARCHITECTURE)
