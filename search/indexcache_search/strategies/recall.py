"""Kascade's objective: how much of a layer's attention another layer's pages hold (arXiv 2512.16391)."""

from __future__ import annotations

from indexcache_search.strategies.similarity import Similarity


class Recall(Similarity):
    """The same dynamic program over recalled attention, as Kascade's, with one choice for all heads."""

    name = "recall"
    summary = "dense models: no pattern, but how much attention another layer's pages hold (Kascade's objective)"
    dense = True
