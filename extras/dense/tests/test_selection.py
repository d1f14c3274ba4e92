"""What D, F and S mean with a selection, and how it travels."""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from indexcache_dense.selection import DEFAULT, Selection
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import IndexCacheError, Pattern, PatternFile
from sglang_indexcache.io.errors import PatternError, PatternFileError
from sglang_indexcache.io.messages import BEGINS_SHARED
from sglang_indexcache.pattern import uniform_pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.request import carried, wanted
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.requested import Request
from tests.conftest import tiny_dense_config

FILE = pattern_file(Pattern("DSSDSS", DEFAULT), tiny_dense_config())


def test_letters_sources_and_flips() -> None:
    pattern = Pattern("DDSFSS", DEFAULT)
    assert pattern.full_layers == (0, 1) and pattern.shared_layers == (2, 4, 5)
    assert pattern.source_layers == (0, 1, 1, 3, 3, 3)
    assert pattern.share(1) == Pattern("DSSFSS", DEFAULT) and pattern.unshare(2).roles == "DDDFSS"
    assert {item.roles for item in Pattern("DSD", DEFAULT).neighbours()} == {"DDS"}
    assert uniform_pattern(Pattern.full(6, selection=DEFAULT), PatternSpec.read("uniform@1/3").retention or 1, 1) == (
        Pattern("DDSSSS", DEFAULT)
    )
    assert Pattern("DDDD", DEFAULT).keeping([0, 2]).roles == "DSDS"


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ("SDD", f"{BEGINS_SHARED}, but layer 0 has no earlier layer to share from; expected D"),
        ("DXS", "pattern has 'X' for layer 1, expected D, F or S"),
        ("", "pattern is empty, expected one letter D, F or S for each layer"),
    ],
)
def test_patterns_that_are_none(roles: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        Pattern(roles, DEFAULT)


def test_a_d_needs_a_selection() -> None:
    with pytest.raises(PatternError, match=r"pattern has 'D' for layer 0, expected F or S \(D needs a selection\)"):
        Pattern("DSS")
    with pytest.raises(PatternError, match="DSS has a D, which needs a selection; expected a pattern file"):
        PatternSpec.read("DSS")
    assert PatternSpec.read("DSS", DEFAULT).letters == Pattern("DSS", DEFAULT)


def test_fingerprints_tell_selections_apart() -> None:
    one, other = Pattern("DSS", DEFAULT), Pattern("DSS", replace(DEFAULT, sink_pages=1))
    assert one.key == "DSS|16|64|8|0|token_max" and Pattern.from_key(one.key) == one != other
    assert one.fingerprint == hashlib.sha256(one.key.encode()).hexdigest() != other.fingerprint
    assert Pattern("FSS").key == "FSS" and Pattern.from_key("FSS") == Pattern("FSS")


@pytest.mark.parametrize(
    "text",
    ["", "16", "16|64|8|0", "16|64|8|0|x", "16|64|8|0|token_max|", "016|64|8|0|token_max", "1٦|64|8|0|token_max"],
)
def test_keys_that_are_none(text: str) -> None:
    with pytest.raises(PatternError):
        Selection.parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 12}, "page_tokens is 12, expected a power of two"),
        ({"page_tokens": 0}, "page_tokens is 0, expected 1 to 1024"),
        ({"pages": 65537}, "pages is 65537, expected 2 to 65536"),
        ({"pages": True}, "pages is True, expected 2 to 65536"),
        ({"recent_pages": 0}, "recent_pages is 0, expected 1 to 65536"),
        ({"sink_pages": -1}, "sink_pages is -1, expected 0 to 65536"),
        ({"recent_pages": 60, "sink_pages": 4}, r"pages is 64, expected more than recent_pages \(60\) and sink_pages"),
        ({"score": "page_mass"}, "score is 'page_mass', expected token_max"),
    ],
)
def test_selections_that_are_none(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PatternError, match=message):
        replace(DEFAULT, **changes)


def test_a_file_says_the_selection_in_full() -> None:
    text = FILE.dumps()
    assert "selection: {page_tokens: 16, pages: 64, recent_pages: 8, sink_pages: 0, score: token_max}\n" in text
    assert PatternFile.loads(text) == FILE and FILE.as_pattern() == Pattern("DSSDSS", DEFAULT)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("pages: 64, ", "", "selection.pages: missing"),
        ("pages: 64", "pages: 64, best: 3", "selection.best: unknown key"),
        ("pages: 64", "pages: 8", r"selection: pages is 8, expected more than recent_pages \(8\)"),
        ("pages: 64", "pages: 64.0", "selection.pages: found 64.0, expected: "),
        ("token_max", "best", "selection.score: found 'best', expected: 'token_max'"),
        ("pattern: DSSDSS", "pattern: SSSDSS", f"pattern: {BEGINS_SHARED}"),
        ("pattern: DSSDSS", "pattern: FSSFSS", "retention: found .*, but pattern keeps 0.0000 of its layers"),
    ],
)
def test_files_that_say_it_wrongly(before: str, after: str, message: str) -> None:
    text = FILE.dumps()
    assert before in text
    with pytest.raises(PatternFileError, match=message):
        PatternFile.loads(text.replace(before, after))


def test_f_and_s_alone_are_no_pages() -> None:
    without = "\n".join(line for line in FILE.dumps().splitlines() if not line.startswith("selection"))
    with pytest.raises(PatternFileError, match=r"pattern: pattern has 'D' for layer 0, expected F or S"):
        PatternFile.loads(without)


def test_a_thousand_malformed_selections_give_one_line_each() -> None:
    """What is accepted nevertheless says what it says: it comes back from its own text."""
    rng, accepted = random.Random(0), 0
    values = [-1, 0, 1, 2, 3, 8, 16, 64, 10**9, 10**30, 1.5, "16", "", None, True, [], {}, "token_max", "nan"]
    for _ in range(1000):
        section: dict[str, Any] = dict(asdict(DEFAULT))
        for _ in range(rng.randint(1, 3)):
            match rng.randrange(3):
                case 0:
                    section[rng.choice(list(section) or ["pages"])] = rng.choice(values)
                case 1:
                    section.pop(rng.choice(list(section) or ["pages"]), None)
                case _:
                    section[rng.choice(["page", "Pages", "scores", "top_k"])] = rng.choice(values)
        content = FILE.model_dump(by_alias=True, exclude_none=True, mode="json")
        content["selection"] = rng.choice([section] * 9 + values)
        try:
            found = PatternFile.loads(_yaml(content))
        except IndexCacheError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, error
        else:
            accepted += 1
            assert PatternFile.loads(found.dumps()) == found
    assert 0 < accepted < 200


def _yaml(content: Any) -> str:
    import yaml

    return yaml.safe_dump(content, sort_keys=False)


def test_the_selection_travels_with_the_server_arguments(tmp_path: Path) -> None:
    FILE.save(tmp_path / "pattern.yaml")
    read = wanted(Request(asked=Asked(pattern=str(tmp_path / "pattern.yaml"))))
    found = wanted(Request(asked=Asked(), carried=carried(read)))
    assert found is not None and found.known() == Pattern("DSSDSS", DEFAULT)


def test_layers_that_select_for_themselves() -> None:
    assert Pattern("DFSF", DEFAULT).own_layers == (1, 3) and Pattern("FSFS").own_layers == ()
    full = [Pattern("DDD", DEFAULT), Pattern("FFF")]
    others = [Pattern("DFD", DEFAULT), Pattern("FFF", DEFAULT), Pattern("FFS"), Pattern.parse("FFF+1q4")]
    assert all(pattern.is_full for pattern in full) and not any(pattern.is_full for pattern in others)
