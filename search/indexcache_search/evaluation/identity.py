"""Conditions on which results depend, as recorded in journals and logs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation.objectives import Objective
from sglang_indexcache import ModelLayers

JOURNAL_FORMAT = 5


class Place(NamedTuple):
    """Name of the device that a model runs on, and SGLang's version; `None` where that is not known."""

    device: str | None = None
    sglang: str | None = None


class Identified(Protocol):
    """An evaluator that says on what its losses depend.

    Attributes:
        name: engine and version: `transformers 5.23.0`.
        settings: other conditions of a result (torch, dtype, device, batch size); part of a search's identity.
        model: the model's layers, locked layers and digest.
        weights_sha256: digest of the model's files, see `sglang_indexcache.model.files.weight_files`.
    """

    name: str
    settings: Mapping[str, str]
    model: ModelLayers
    weights_sha256: str


def identity(engine: Identified, calibration: TokenSet, held_out: TokenSet, objective: Objective) -> dict[str, Any]:
    """Return the journal's identity: everything that evaluations depend on."""
    return {
        **engine_identity(engine),
        "objective": objective,
        "calibration": calibration.sha256,
        "held-out": held_out.sha256,
    }


def engine_identity(engine: Identified) -> dict[str, Any]:
    """Return the part of a journal's identity that describes the engine and model."""
    return {
        "format": JOURNAL_FORMAT,
        "model": engine.model.name,
        "config_sha256": engine.model.config_sha256,
        "weights_sha256": engine.weights_sha256,
        "engine": engine.name,
        **engine.settings,
    }


def engine_words(engine: Identified) -> str:
    """Describe the engine for users, in one line."""
    return f"{engine.name}, {', '.join(f'{key} {value}' for key, value in engine.settings.items())}"


def today() -> dict[str, str]:
    """Return the facts that a journal keeps from the first run."""
    return {"created": time.strftime("%Y-%m-%d")}
