"""What results depend on, as journals and logs remember it."""

from __future__ import annotations

import time
from typing import Any

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Engine
from indexcache_search.evaluation.objectives import Objective

JOURNAL_FORMAT = 5


def identity(engine: Engine, calibration: TokenSet, held_out: TokenSet, objective: Objective) -> dict[str, Any]:
    """What evaluations depend on: the journal's identity."""
    return {
        **engine_identity(engine),
        "objective": objective,
        "calibration": calibration.sha256,
        "held-out": held_out.sha256,
    }


def engine_identity(engine: Engine) -> dict[str, Any]:
    """The part of a journal's identity that says what evaluates."""
    return {
        "format": JOURNAL_FORMAT,
        "model": engine.model.name,
        "config_sha256": engine.model.config_sha256,
        "weights_sha256": engine.weights_sha256,
        "engine": engine.name,
        **engine.settings,
    }


def engine_words(engine: Engine) -> str:
    """The same for people, in one line."""
    return f"{engine.name}, {', '.join(f'{key} {value}' for key, value in engine.settings.items())}"


def today() -> dict[str, str]:
    """Facts a journal remembers from the first run."""
    return {"created": time.strftime("%Y-%m-%d")}
