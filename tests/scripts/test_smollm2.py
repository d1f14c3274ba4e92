"""Sequences to train on hold what they repeat."""

from __future__ import annotations

import random

from scripts.tools.smollm2 import repeated


def test_the_end_repeats_a_passage_of_the_prompt() -> None:
    ids, rng = list(range(40)), random.Random(0)
    for _ in range(50):
        found = repeated(ids, 8, rng)
        assert len(found) == 40 and found[:32] == ids[:32]
        assert found[32:] == ids[found[32] : found[32] + 8] and found[32] + 8 <= 32
