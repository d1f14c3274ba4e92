"""Engines' spellings: what each one would really read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GlmMoeDsaConfig

from extras.launch.tests.override_spellings import V32
from indexcache_launch.rules import (
    GLM,
    HY_V4,
    SGLANG_HY_V4_RULES,
    SGLANG_RULES,
    VLLM_HY_V4_RULES,
    VLLM_RULES,
    Rule,
    read,
)
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.override import (
    by_key,
    freq_pattern,
    indexer_types,
    meanings,
    read_spelling,
    to_sglang,
    to_vllm,
)
from sglang_indexcache.io.errors import PatternError, SpellingError
from sglang_indexcache.io.messages import OTHER_LENGTH
from tests.conftest import PAGES
from tests.core.test_pattern import ROLES


def transformers_reads(config: dict[str, Any], num_layers: int) -> Pattern:
    types = GlmMoeDsaConfig(num_hidden_layers=num_layers, **config).indexer_types
    return Pattern("".join("F" if name == "full" else "S" for name in types))


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5))
def test_freq_is_read_as_transformers_reads_it(num_layers: int, freq: int, offset: int) -> None:
    config = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    assert read_spelling(config, num_layers) == transformers_reads(config, num_layers)


@settings(max_examples=30)
@given(ROLES)
def test_what_we_write_for_transformers_is_what_it_builds(roles: str) -> None:
    pattern = Pattern(roles)
    assert transformers_reads({"indexer_types": indexer_types(pattern)}, len(pattern)) == pattern


RULES = [
    *((rule, architecture) for rule in (*SGLANG_RULES, *VLLM_RULES) for architecture in (GLM, V32)),
    *((rule, HY_V4) for rule in (*SGLANG_HY_V4_RULES, *VLLM_HY_V4_RULES)),
]


@settings(max_examples=30)
@given(ROLES)
@pytest.mark.parametrize(("rule", "architecture"), RULES, ids=lambda item: getattr(item, "name", item))
def test_what_we_write_runs_on_every_version_that_was_read(rule: Rule, architecture: str, roles: str) -> None:
    """HY-V4 fills `indexer_types` in and vLLM reads them first there: letters alone are ignored without a word."""
    pattern = Pattern(roles)
    write = to_vllm if rule.engine == "vLLM" else to_sglang
    assert read(rule, architecture, {"num_hidden_layers": len(pattern)}, write(pattern)).roles == roles


def test_what_no_configuration_says_is_not_written() -> None:
    dense = Pattern("DSS", PAGES)
    for write in (to_sglang, to_vllm, indexer_types):
        with pytest.raises(PatternError, match="dense model has no spelling in any engine"):
            write(dense)


def test_of_two_keys_that_contradict_each_other_the_first_wins() -> None:
    keys = {"index_topk_pattern": "FSFS", "indexer_types": ["full"] * 4}
    assert read_spelling(keys, 4).roles == "FFFF"
    assert {key: pattern.roles for key, pattern in by_key(keys, 4).items()} == {
        "indexer_types": "FFFF",
        "index_topk_pattern": "FSFS",
    }


def test_freq_with_offset_1_is_the_papers_uniform() -> None:
    assert freq_pattern(10, 4, 1) == Pattern.uniform(10, 4)
    assert read_spelling({"index_topk_freq": 4}, 10).roles == "FFSSSFSSSF"


def test_glm_5_2_native_schedule() -> None:
    """freq 4 with offset 3 over 78 layers runs 21 indexers: layers 0, 1, 2, 6, 10, ..."""
    pattern = freq_pattern(78, 4, 3)
    assert pattern.full_layers == (0, 1, 2, *range(6, 78, 4))
    assert len(pattern.full_layers) == 21


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"index_topk_pattern": "FSF"}, OTHER_LENGTH.format(3, 4)),
        ({"index_topk_pattern": "FFsF"}, "'s' for layer 2"),
        ({"index_topk_pattern": 7}, "pattern is int"),
        ({"indexer_types": ["full", "half", "full", "full"]}, "'half' for layer 1"),
        ({"indexer_types": "FFFF"}, "expected a list"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"index_topk_freq": True}, "index_topk_freq is True"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_skip_topk_offset is 0"),
        ({"cli_factor": 2}, "cli_factor is 2"),
        ({"cli_factor": "a"}, "cli_factor is a"),
    ],
)
def test_what_nobody_means_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SpellingError, match=message):
        read_spelling(config, 4)


def test_nothing_declared_means_all_full() -> None:
    assert read_spelling({"index_topk_freq": None, "indexer_types": None}, 3).roles == "FFF"


def test_indexer_types() -> None:
    assert indexer_types(Pattern("FSF")) == ["full", "shared", "full"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"index_topk_pattern": ["F", "S", "F", "S"]}, {"index_topk_pattern": "FSFS"}),
        ({"index_topk_pattern": ["full", "shared", "full", "full"]}, {"index_topk_pattern": "FSFF"}),
        ({"index_topk_freq": 1}, {"index_topk_freq": "FFFF"}),
        ({"index_topk_freq": 1, "index_topk_pattern": "FSFS"}, {"index_topk_pattern": "FSFS"}),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, {"index_topk_freq": "FSSF"}),
        ({"indexer_types": None, "index_topk_pattern": "FSFS"}, {"index_topk_pattern": "FSFS"}),
        ({"rope_theta": 1, "text_config": {"hidden_size": 8}}, {}),
    ],
)
def test_each_key_of_an_override_has_its_own_meaning(given: dict[str, Any], found: dict[str, str]) -> None:
    assert {key: pattern.roles for key, pattern in meanings(given, 4).items()} == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"index_topk_pattern": ["F", "shared"]}, "index_topk_pattern has 'shared' for layer 1, expected 'F' or 'S'"),
        ({"index_topk_pattern": [1, 0, 1, 0]}, "index_topk_pattern has 1 for layer 0, expected 'full' or 'shared'"),
        ({"index_topk_pattern": "F,S,F,S"}, "',' for layer 1, expected F or S"),
        ({"index_topk_pattern": "fsfs"}, "'f' for layer 0, expected F or S in capitals"),
        ({"index_topk_pattern": "FSFS\n"}, "for layer 4"),
        ({"index_skip_topk_offset": 3}, "index_skip_topk_offset says nothing without index_topk_freq"),
        ({"text_config": {"index_topk_pattern": "FSFS"}}, "index_topk_pattern stands in text_config, where it is not"),
    ],
)
def test_an_override_that_means_nothing_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpellingError, match=message):
        meanings(given, 4)
