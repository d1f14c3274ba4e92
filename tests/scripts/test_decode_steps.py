"""Names of dense patterns in tables of decode steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import COMPRESSED_KEYS, DEFAULT
from scripts.bench.serving.decode_steps import name_of
from sglang_indexcache import Pattern


@pytest.mark.parametrize(
    ("roles", "steps", "name"),
    [("DSSS", "none", "1 D"), ("DFSS", "none", "1 D 1 F"), ("DDFSFS", "ema:0.9", "2 D 2 F ema:0.9")],
)
def test_a_name_has_the_numbers_of_layers_and_what_a_selection_remembers(roles: str, steps: str, name: str) -> None:
    assert name_of(Pattern(roles, replace(DEFAULT, score=COMPRESSED_KEYS, steps=ReusePolicy.parse(steps)))) == name
