"""The families of models that can be searched and served.

A new one is a `base.Family`, whose three parts stand in a folder here or in an extension; extensions register theirs by
an entry point of the group `indexcache.families`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sglang_indexcache.families.base import Family
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.hy_v4 import HY_V4
from sglang_indexcache.families.refused import label, refusal, renamed
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.io.extensions import ExtensionError, extensions
from sglang_indexcache.model.layers import ModelLayers

_OWN: tuple[Family, ...] = (DSA, HY_V4, DEEPSEEK_V4)


@cache
def known_families() -> tuple[Family, ...]:
    """Return the families of this package, and those of extensions.

    Raises:
        ExtensionError: if an extension can't be loaded, or claims a name or an architecture of another family.
    """
    found = list(_OWN)
    for entry, family in extensions("families", Family).items():
        for other in found:
            both = {family.name, *family.checkpoint.keys} & {other.name, *other.checkpoint.keys}
            if both:
                raise ExtensionError(
                    f"extension {entry} of indexcache.families: {min(both)} is of the family {other.name}, expected"
                    " another name"
                )
        found.append(family)
    return tuple(found)


@cache
def _by_architecture() -> dict[str, Family]:
    return {architecture: family for family in known_families() for architecture in family.checkpoint.keys}


def family_of(architecture: str) -> Family:
    """Find the family of an architecture, as in config.json.

    Raises:
        ModelConfigError: if there is none.
    """
    family = _by_architecture().get(architecture)
    if family is None:
        raise ModelConfigError(f"{architecture} has no attention known here, expected {_known()}")
    return family


def family_of_modules(model: object) -> Family:
    """Find the family of a transformers model, by its class or one that it is derived from.

    Raises:
        ModelConfigError: if there is none.
    """
    names = [item.__name__ for item in type(model).__mro__]
    return family_of(next((name for name in names if name in _by_architecture()), names[0]))


def describe(config: Mapping[str, Any], name: str) -> ModelLayers:
    """Describe a model's layers from a parsed config.json; `name` is the model's for people.

    Raises:
        ModelConfigError: if its architecture is of no family, or a needed key is missing or wrong.
    """
    config = renamed(config)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ModelConfigError(f"{name}: config.json: architectures is {architectures!r}, expected a list")
    named = list(map(str, architectures))
    if not named:
        expected = f'"architectures": ["{label(config)}"]' if label(config) else _known()
        raise ModelConfigError(
            f"{name}: {config.get('model_type', 'no architecture')} has no attention known here: config.json has no"
            f" architectures, by which SGLang goes; expected {expected}"
        )
    reason = refusal(config, named[0])
    if reason is not None:
        raise ModelConfigError(f"{name}: {reason}" + ("" if "; expected" in reason else f"; expected {_known()}"))
    if named[0] in _by_architecture():
        return _by_architecture()[named[0]].checkpoint.describe(config, name, named[0])
    other = label(config) or next((item for item in named if item in _by_architecture()), None)
    if other is not None:
        raise ModelConfigError(
            f"{name}: {named[0]} has no attention known here, and SGLang goes by the first of architectures; expected"
            f" {other} there, if it is one"
        )
    raise ModelConfigError(f"{name}: {', '.join(named)} has no attention known here, expected {_known()}")


def _known() -> str:
    return " or ".join(_by_architecture())
