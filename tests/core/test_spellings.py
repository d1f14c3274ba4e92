"""Engines' spellings: what each one would really read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GlmMoeDsaConfig

from sglang_indexcache import Pattern
from sglang_indexcache.errors import SpellingError
from sglang_indexcache.families.dsa.spellings import (
    Rule,
    freq_pattern,
    indexer_types,
    read_spelling,
    to_sglang,
    to_vllm,
)
from tests.core.test_pattern import ROLES


def transformers_reads(config: dict[str, Any], num_layers: int) -> Pattern:
    types = GlmMoeDsaConfig(num_hidden_layers=num_layers, **config).indexer_types
    return Pattern("".join("F" if name == "full" else "S" for name in types))


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_freq_is_read_as_transformers_reads_it(num_layers: int, freq: int, offset: int) -> None:
    config = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    assert read_spelling(config, num_layers, Rule.TRANSFORMERS_GLM).pattern == transformers_reads(config, num_layers)


@settings(max_examples=30)
@given(ROLES)
def test_what_we_write_for_transformers_is_what_it_builds(roles: str) -> None:
    pattern = Pattern(roles)
    assert transformers_reads({"indexer_types": indexer_types(pattern)}, len(pattern)) == pattern


@given(ROLES, st.sampled_from([Rule.SGLANG_PATTERN_FIRST, Rule.SGLANG_TYPES_FIRST]))
def test_one_sglang_override_means_the_same_under_both_rules(roles: str, rule: Rule) -> None:
    pattern = Pattern(roles)
    assert read_spelling(to_sglang(pattern), len(pattern), rule).pattern == pattern


@given(ROLES)
def test_vllm_override(roles: str) -> None:
    pattern = Pattern(roles)
    assert read_spelling(to_vllm(pattern), len(pattern), Rule.VLLM).pattern == pattern


def test_the_silent_trap_of_new_sglang_on_glm5_is_reported() -> None:
    """transformers fills indexer_types; an index_topk_pattern override then has no effect."""
    config = {"indexer_types": ["full"] * 4, "index_topk_pattern": "FSFS"}
    assert read_spelling(config, 4, Rule.SGLANG_PATTERN_FIRST).pattern.roles == "FSFS"
    reading = read_spelling(config, 4, Rule.SGLANG_TYPES_FIRST)
    assert reading.pattern.roles == "FFFF"
    assert reading.notes == ("index_topk_pattern is ignored, because indexer_types is set too and wins",)


def test_freq_4_is_not_the_papers_uniform_and_says_so() -> None:
    reading = read_spelling({"index_topk_freq": 4}, 10, Rule.SGLANG_TYPES_FIRST)
    assert reading.pattern.roles == "FFSSSFSSSF"
    assert reading.key == "index_topk_freq"
    assert reading.notes == ("index_topk_freq=4 is FFSSSFSSSF, not the paper's uniform FSSSFSSSFS",)


def test_freq_with_offset_1_is_the_papers_uniform() -> None:
    assert freq_pattern(10, 4, 1) == Pattern.uniform(10, 4)
    reading = read_spelling({"index_topk_freq": 4, "index_skip_topk_offset": 1}, 10, Rule.SGLANG_PATTERN_FIRST)
    assert reading.notes == ()


def test_glm_5_2_native_schedule() -> None:
    """freq 4 with offset 3 over 78 layers runs 21 indexers: layers 0, 1, 2, 6, 10, ..."""
    pattern = freq_pattern(78, 4, 3)
    assert pattern.full_layers == (0, 1, 2, *range(6, 78, 4))
    assert len(pattern.full_layers) == 21


@pytest.mark.parametrize(
    ("config", "rule", "message"),
    [
        ({"index_topk_pattern": "FSF"}, Rule.SGLANG_PATTERN_FIRST, "3 letters, model has 4 DSA layers"),
        ({"index_topk_pattern": "FFsF"}, Rule.SGLANG_PATTERN_FIRST, "'s' for layer 2"),
        ({"index_topk_pattern": 7}, Rule.SGLANG_PATTERN_FIRST, "pattern is int"),
        ({"indexer_types": ["full", "half", "full", "full"]}, Rule.SGLANG_TYPES_FIRST, "'half' for layer 1"),
        ({"indexer_types": "FFFF"}, Rule.SGLANG_TYPES_FIRST, "expected a list"),
        ({"index_topk_freq": 0}, Rule.SGLANG_TYPES_FIRST, "index_topk_freq is 0"),
        ({"index_topk_freq": True}, Rule.SGLANG_TYPES_FIRST, "index_topk_freq is True"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, Rule.SGLANG_TYPES_FIRST, "index_skip_topk_offset is 0"),
        ({"cli_factor": 2}, Rule.SGLANG_TYPES_FIRST, "cli_factor is 2"),
        ({"cli_factor": "a"}, Rule.SGLANG_TYPES_FIRST, "cli_factor is a"),
    ],
)
def test_what_nobody_means_is_refused(config: dict[str, Any], rule: Rule, message: str) -> None:
    with pytest.raises(SpellingError, match=message):
        read_spelling(config, 4, rule)


def test_nothing_declared_means_all_full() -> None:
    reading = read_spelling({"index_topk_freq": None, "indexer_types": None}, 3, Rule.SGLANG_TYPES_FIRST)
    assert (reading.pattern.roles, reading.key, reading.notes) == ("FFF", None, ())


def test_indexer_types() -> None:
    assert indexer_types(Pattern("FSF")) == ["full", "shared", "full"]


def test_vllm_reads_a_pattern_without_its_old_switch() -> None:
    reading = read_spelling({"index_topk_pattern": "FSFS"}, 4, Rule.VLLM)
    assert reading.pattern.roles == "FSFS"
    assert reading.notes == (
        "index_topk_pattern needs use_index_cache beside it in vLLM before 0.33, which does not read it any more",
    )
    assert read_spelling({"index_topk_pattern": "FSFS", "use_index_cache": True}, 4, Rule.VLLM).notes == ()
