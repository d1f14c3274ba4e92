"""The pattern: which layers select tokens, which reuse a selection, and what is selected."""

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
