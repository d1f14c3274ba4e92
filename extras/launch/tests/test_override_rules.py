"""Overrides that people write, by seed: what the tables say runs is what a slow definition says, on every version."""

from __future__ import annotations

from collections import Counter

import pytest

from extras.launch.tests.override_spellings import LAYERS, V32, VERSIONS, case, slow
from indexcache_launch.override_alone import contradicting, unlike_uniform
from indexcache_launch.reading import READ_VERSIONS, merged, of_version
from indexcache_launch.rules import GLM, HY_V4, SGLANG_HY_V4_RULES, SGLANG_RULES, Rule, read

SEEDS = range(2000, 3500)


def rules_of(architecture: str) -> tuple[Rule, ...]:
    return SGLANG_HY_V4_RULES if architecture == HY_V4 else SGLANG_RULES


def test_every_version_has_one_rule() -> None:
    assert tuple(version for rule in SGLANG_RULES for version in rule.versions) == READ_VERSIONS == VERSIONS


def test_the_rules_are_the_slow_definition() -> None:
    """A key that wins in one version and not in the next would be reported for the wrong one."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        architecture, config, overrides = case(seed)
        for rule in rules_of(architecture):
            found = read(rule, architecture, config, overrides)
            for version in rule.versions:
                assert found.roles == slow(version, architecture, config, overrides), (seed, version, found.line)
            seen[found.source or ("refused" if found.roles is None else "nothing")] += 1
    assert min(seen[kind] for kind in ("override", "config.json", "configuration class", "refused", "nothing")) > 100


def test_joined_versions_say_what_each_would_have_said() -> None:
    for seed in SEEDS[:300]:
        architecture, config, overrides = case(seed)
        joined = merged(read(rule, architecture, config, overrides) for rule in rules_of(architecture))
        for rule in rules_of(architecture):
            for version in rule.versions:
                found = of_version(joined, f"{version}+cu130")
                assert found is not None and found.versions == (version,)
                assert found.roles == slow(version, architecture, config, overrides)
                assert found.line.startswith(f"SGLang {version}")


def test_a_line_names_the_keys_without_effect_and_no_others() -> None:
    """Whoever reads that a key is ignored may leave it out: then the same must run."""
    for seed in SEEDS:
        architecture, config, overrides = case(seed)
        for rule in rules_of(architecture):
            found = read(rule, architecture, config, overrides)
            without = {key: value for key, value in overrides.items() if key not in found.ignored}
            if found.roles is not None:
                assert read(rule, architecture, config, without).roles == found.roles, (seed, found.line)
                assert all(key in found.line for key in found.ignored), found.line


GLM_5 = {"num_hidden_layers": LAYERS}
FILLS = "(it reads indexer_types first, which its configuration class fills in): "


@pytest.mark.parametrize(
    ("architecture", "overrides", "version", "roles", "line"),
    [
        (GLM, {"index_topk_pattern": "FSSFSSFS"}, "0.5.19", "FSSFSSFS", "runs 3 of 8 layers F by index_topk_pattern"),
        (
            GLM,
            {"index_topk_pattern": "FSSFSSFS"},
            "0.5.23",
            "F" * 8,
            f"ignores index_topk_pattern on {GLM} {FILLS}all 8 layers stay F",
        ),
        (V32, {"index_topk_pattern": "FSSFSSFS"}, "0.5.23", "FSSFSSFS", "runs 3 of 8 layers F by index_topk_pattern"),
        (V32, {"index_topk_freq": 4}, "0.5.11", "FFSSSFSS", "runs 3 of 8 layers F by index_topk_freq"),
        (
            V32,
            {"index_topk_freq": 4, "index_skip_topk_offset": 1},
            "0.5.11",
            "FFSSSFSS",
            "runs 3 of 8 layers F by index_topk_freq, and ignores index_skip_topk_offset",
        ),
        (V32, {"index_topk_freq": 4, "index_skip_topk_offset": 1}, "0.5.13", "FSSSFSSS", "runs 2 of 8 layers F"),
        (
            V32,
            {"indexer_types": ["full"] + ["shared"] * 7},
            "0.5.17",
            "F" * 8,
            f"ignores indexer_types on {V32} (it does not read it): all 8 layers stay F",
        ),
        (HY_V4, {"index_topk_pattern": "F" + "S" * 7}, "0.5.20", "FFSSSFSS", f"on {HY_V4} {FILLS}3 of 8 layers stay F"),
        (GLM, {"indexer_types": "FSSSFSSS"}, "0.5.11", None, 'refuses it: indexer_types is "FSSSFSSS"'),
        (V32, {"index_topk_pattern": "FSS"}, "0.5.13", None, "refuses it: index_topk_pattern has 3 entries for 8"),
        (V32, {"index_topk_pattern": "FSS"}, "0.5.14", "FSSFFFFF", "runs 6 of 8 layers F by index_topk_pattern"),
        (V32, {"index_topk_pattern": "F,S,S,S,F,S,S,S"}, "0.5.23", "FFSFSFSF", "runs 5 of 8 layers F"),
        (V32, {"index_topk_pattern": "SFFFFFFF"}, "0.5.23", "SFFFFFFF", "the first long prompt ends the server"),
        (
            V32,
            {"cli_factor": 2, "index_topk_pattern": "F" * 8},
            "0.5.16",
            "FSFSFSFS",
            "by cli_factor, and ignores index",
        ),
        (V32, {"text_config": {"index_topk_freq": 4}}, "0.5.23", None, f"refuses it: {V32} has no text_config"),
        (
            GLM,
            {"indexer_types": None, "index_topk_pattern": "FSSFSSFS"},
            "0.5.23",
            "FSSFSSFS",
            "runs 3 of 8 layers F by index_topk_pattern",
        ),
    ],
)
def test_what_a_pasted_flag_runs(
    architecture: str, overrides: dict[str, object], version: str, roles: str | None, line: str
) -> None:
    found = of_version((read(rule, architecture, GLM_5, overrides) for rule in rules_of(architecture)), version)
    assert found is not None and found.roles == roles
    assert line in found.line


def test_two_keys_that_contradict_each_other_are_said() -> None:
    keys = {"indexer_types": ["full"] * 4, "index_topk_pattern": "FSFS"}
    assert contradicting(keys, 4) == ["index_topk_pattern means FSFS, indexer_types FFFF"]
    assert contradicting({**keys, "index_topk_pattern": "FFFF"}, 4) == contradicting({}, 4) == []


def test_freq_4_is_not_the_papers_uniform_and_says_so() -> None:
    assert unlike_uniform({"index_topk_freq": 4}, 10) == [
        "index_topk_freq=4 is FFSSSFSSSF, not the paper's uniform FSSSFSSSFS"
    ]
    assert unlike_uniform({"index_topk_freq": 4, "index_skip_topk_offset": 1}, 10) == []
    assert unlike_uniform({"index_topk_freq": 1}, 10) == []
    assert unlike_uniform({"index_topk_freq": 4, "index_topk_pattern": "FFSSSFSSSF"}, 10) == []
