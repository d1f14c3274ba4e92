"""A simulated model with times, and settings of searches on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.searching.settings import Settings
from indexcache_search.strategies import strategy_of
from scripts.bench.search.simulated import SimulatedEngine

FULL, SHARED, REST = 0.020, 0.011, 0.05  # seconds of a layer, and of all else of a sequence


class ClockedEngine(SimulatedEngine):
    """A simulated model whose evaluations say what they would take on a server, which runs every layer."""

    def evaluate(self, *args: Any, **kwargs: Any) -> Iterator[Evaluation]:
        for item in super().evaluate(*args, **kwargs):
            shared = len(item.pattern.shared_layers)
            each = FULL * (self.model.num_layers - shared) + SHARED * shared + REST
            yield replace(item, seconds=each * len(item.rows))


def settings_of(name: str) -> Settings:
    return Settings(retain=(Fraction(1, 2), Fraction(1, 4)), strategy=strategy_of(name), objective="nll")
