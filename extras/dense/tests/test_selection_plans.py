"""The plan of a selection: its word, its section of a file, what does not go together, and what servers take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from extras.dense.tests.test_steps import KEYS, POLICIES
from indexcache_dense.reuse import NO_MEMORY, ReusePolicy
from indexcache_dense.selection import Selection
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import family_of
from sglang_indexcache.io.errors import PatternError, PatternFileError, SpellingError
from tests.conftest import tiny_dense_config

PLAN = replace(KEYS, page_tokens=64, pages=32, recent_pages=8, sink_pages=1, steps=ReusePolicy.parse("ema:0.9"))


def test_plans_say_all_of_it_in_one_word() -> None:
    plan = replace(PLAN, buffer_pages=48)
    assert str(plan) == "64|32|8|1|compressed_keys|ema:0.9|48" and Selection.parse(str(plan)) == plan
    assert str(replace(plan, steps=NO_MEMORY)) == "64|32|8|1|compressed_keys|none|48"
    assert str(PLAN) == "64|32|8|1|compressed_keys|ema:0.9|" and Selection.parse(str(PLAN)) == PLAN
    prints = {Pattern("DFSSS", selection).fingerprint for selection in (plan, PLAN, replace(PLAN, steps=NO_MEMORY))}
    assert len(prints) == 3
    for policy in POLICIES:
        assert str(ReusePolicy.parse(policy)) == policy


def test_heads_are_part_of_a_plan_and_of_its_fingerprint() -> None:
    """`joint` is said by nothing, so that older plans keep their words."""
    plans = {str(replace(plan, heads=heads)): plan for plan in (PLAN, KEYS) for heads in ("joint", "key")}
    assert list(plans) == [
        "64|32|8|1|compressed_keys|ema:0.9|",
        "64|32|8|1|compressed_keys|ema:0.9||key",
        "32|4|2|0|compressed_keys",
        "32|4|2|0|compressed_keys|none||key",
    ]
    for text in plans:
        assert str(Selection.parse(text)) == text
        assert Selection.parse(text).heads == ("key" if text.endswith("key") else "joint")
    assert len({Pattern("DFS", Selection.parse(text)).fingerprint for text in plans}) == 4
    for text in (
        "32|4|2|0|compressed_keys|none||joint",
        "32|4|2|0|compressed_keys||key",
        "32|4|2|0|compressed_keys|none||k",
    ):
        with pytest.raises(PatternError, match=r"selection is|heads is|steps are"):
            Selection.parse(text)
    with pytest.raises(PatternError, match="heads is 'query', expected joint or key"):
        replace(PLAN, heads="query")  # type: ignore[arg-type]
    by_head = pattern_file(Pattern("DSSDSS", replace(KEYS, heads="key")), tiny_dense_config())
    assert "score: compressed_keys, heads: key}" in by_head.dumps() and PatternFile.loads(by_head.dumps()) == by_head
    wrong = by_head.dumps().replace("heads: key", "heads: query")
    with pytest.raises(PatternFileError, match=r"selection\.heads: "):
        PatternFile.loads(wrong)


WRONG = ("", "ema", "ema:", "ema:1", "ema:0.90", "ema:nan", "ema:x", "none:1", "bounded:0", "bounded:1.0", "refresh:1")


@pytest.mark.parametrize("text", [*WRONG, "nosa:-1", "bounded:65537", "best:1", "bounded: 1"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(PatternError, match="steps"):
        ReusePolicy.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": ReusePolicy.parse("bounded:24")}, "swaps is 24, expected at most 23, those chosen by score"),
        ({"steps": ReusePolicy.parse("nosa:24")}, "query_pages is 24, expected at most 23"),
        ({"steps": ReusePolicy.parse("nosa:8"), "recent_pages": 1}, "nosa with page_tokens 64 and recent_pages 1"),
        ({"steps": "ema:0.9"}, "steps is 'ema:0.9', expected a policy"),
        ({"page_tokens": 8}, "page_tokens is 8, expected a multiple of 16 for compressed_keys"),
        ({"buffer_pages": 31}, r"buffer_pages is 31, expected 32 \(pages\) to 65536"),
        ({"buffer_pages": 40.0}, r"buffer_pages is 40.0, expected 32 \(pages\) to 65536"),
    ],
)
def test_selections_that_do_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PatternError, match=message):
        replace(PLAN, **changes)


def test_files_say_what_is_not_the_default() -> None:
    file = pattern_file(Pattern("DSSDSS", replace(PLAN, buffer_pages=64)), tiny_dense_config())
    text = file.dumps()
    line = (
        "selection: {page_tokens: 64, pages: 32, recent_pages: 8, sink_pages: 1, score: compressed_keys, "
        "steps: {policy: ema, beta: 0.9}, buffer_pages: 64}\n"
    )
    assert line in text
    assert PatternFile.loads(text) == file and file.as_pattern().selection == replace(PLAN, buffer_pages=64)
    explicit = text.replace("steps: {policy: ema, beta: 0.9}", "steps: {policy: none}")
    assert PatternFile.loads(explicit).as_pattern().selection == replace(PLAN, steps=NO_MEMORY, buffer_pages=64)
    for before, after, message in (
        ("beta: 0.9", "swaps: 2", "selection.steps: steps: beta of policy ema is None, expected a number"),
        ("beta: 0.9", "beta: 0.9, swaps: 2", "selection.steps: steps: swaps of policy ema is 2, expected none"),
        ("beta: 0.9", "beta: 1", "selection.steps"),
        ("beta: 0.9", "gamma: 0.9", "selection.steps.gamma: unknown key"),
        ("policy: ema", "policy: best", "selection.steps.policy: found 'best'"),
        ("buffer_pages: 64", "buffer_pages: 8", r"selection: buffer_pages is 8, expected 32 \(pages\)"),
    ):
        assert before in text
        with pytest.raises(PatternFileError, match=message):
            PatternFile.loads(text.replace(before, after))


def test_what_servers_take_of_it() -> None:
    served = family_of("LlamaForCausalLM").sglang
    plain = Selection(page_tokens=64, pages=32, recent_pages=8, sink_pages=1, score="token_max")
    compressed, rounded = replace(plain, score="compressed_keys"), replace(plain, score="rounded_keys")
    for steps in ("none", "ema:0.9", "refresh:4"):
        for selection in (plain, compressed, rounded):
            pattern = Pattern("DSS", replace(selection, steps=ReusePolicy.parse(steps)))
            assert served.to_overrides({}, pattern) == {}
        for selection in (compressed, rounded):
            assert served.to_overrides({}, Pattern("DFS", replace(selection, steps=ReusePolicy.parse(steps)))) == {}
    for roles, selection, message in (
        ("DFS", plain, "layer 1 is F, which is not served with score token_max; expected compressed_keys"),
        (
            "DSS",
            replace(plain, heads="key"),
            "is not served yet: heads is key, expected joint; SGLang has one page table",
        ),
        ("DSS", replace(plain, buffer_pages=64), "buffer_pages is 64, which is not served; expected none"),
        *(
            (
                "DSS",
                replace(compressed, steps=ReusePolicy.parse(steps)),
                f"steps {steps} are not served; expected none,",
            )
            for steps in ("bounded:2", "nosa:4", "nosa:4:heads")
        ),
    ):
        with pytest.raises(SpellingError, match=message):
            served.to_overrides({}, Pattern(roles, selection))
