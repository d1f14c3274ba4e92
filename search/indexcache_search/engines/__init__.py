"""Engines that evaluate patterns. `base` holds the protocol; each engine is imported only when it is used."""

from indexcache_search.engines.base import Engine, Evaluation
from indexcache_search.objectives import Objective

__all__ = ["Engine", "Evaluation", "Objective"]
