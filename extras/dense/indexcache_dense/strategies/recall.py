"""Kascade's objective: the share of a layer's attention that another layer's pages hold (arXiv 2512.16391)."""

from __future__ import annotations

from indexcache_search.strategies.similarity import Similarity


class Recall(Similarity):
    """Kascade's dynamic program over recalled attention, with one selection for all heads."""

    name = "recall"
    summary = "dense models: no pattern, but how much attention another layer's pages hold (Kascade's objective)"
    dense = True
