"""The pattern: which layers select what they attend to, and which reuse that; what is selected, and how exactly."""

from __future__ import annotations

from sglang_indexcache.pattern.pattern import (
    DENSE,
    FULL,
    SHARED,
    Pattern,
    full_layer_count,
    parse_retention,
    uniform_pattern,
)

__all__ = ["DENSE", "FULL", "SHARED", "Pattern", "full_layer_count", "parse_retention", "uniform_pattern"]
