"""The journal: what is written is there, what was cut off is not, what belongs to another search is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexcache_dense.selection import DEFAULT
from indexcache_search.errors import JournalError
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.evaluation.records import Sealer
from scripts.tools.recorded import recorded
from sglang_indexcache import Pattern
from sglang_indexcache.io.messages import BEGINS_SHARED

IDENTITY = {"model": "tiny", "calibration": "abc"}
EVALUATION = Evaluation(
    pattern=Pattern("FSF"),
    rows=(2, 0),
    losses=(0.1 + 0.2, 1e-17),
    correct=(3, 4),
    tokens=(5, 6),
    layer_tokens=(7, 8),
    seconds=0.25,
)


def journal(folder: Path, **changes: Any) -> Journal:
    return Journal(folder, {**IDENTITY, **changes}, {"created": "2026-11-21"})


def test_evaluations_come_back_exactly(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.add_evaluation("calibration", EVALUATION)
        first.add_matrix("overlap", [[1.0, 0.1], [0.1, 1.0]])
    with Journal(tmp_path, IDENTITY, {"created": "2030-01-01"}) as second:
        assert second.evaluation("calibration", Pattern("FSF")) == EVALUATION
        assert second.evaluation("calibration", Pattern("FSF"), repeat=1) is None
        assert second.evaluation("held-out", Pattern("FSF")) is None
        assert second.matrix("overlap") == [[1.0, 0.1], [0.1, 1.0]]
        assert second.facts == {"created": "2026-11-21"}


def test_what_is_recorded_can_be_read_without_the_search(tmp_path: Path) -> None:
    """Patterns with a selection among it, which one journal keeps apart."""
    few, more = (Pattern("DSD", replace(DEFAULT, pages=pages)) for pages in (16, 64))
    with journal(tmp_path) as first:
        first.add_matrix("overlap", [[1.0]])
        for pattern in (few, more):
            first.add_evaluation("nll", replace(EVALUATION, pattern=pattern))
    assert recorded(first.path) == [("nll", replace(EVALUATION, pattern=pattern)) for pattern in (few, more)]
    with journal(tmp_path) as again:
        assert again.evaluation("nll", more) == replace(EVALUATION, pattern=more)
        assert again.evaluation("nll", Pattern("DSD", replace(DEFAULT, sink_pages=1))) is None
    first.path.write_bytes(first.path.read_bytes().replace(b"|16|2", b"|32|2").replace(b"|16|8", b"|32|8"))
    with pytest.raises(JournalError, match="damaged"):
        recorded(first.path)


def test_every_cut_of_the_last_line_loses_only_that_line(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.add_evaluation("a", EVALUATION)
        size = first.path.stat().st_size
        first.add_evaluation("b", EVALUATION)
        whole = first.path.read_bytes()
    for cut in range(size, len(whole)):
        (tmp_path / "journal.jsonl").write_bytes(whole[:cut])
        with journal(tmp_path) as again:
            assert again.evaluation("a", Pattern("FSF")) == EVALUATION
            assert again.evaluation("b", Pattern("FSF")) is None
            again.add_evaluation("b", EVALUATION)
        assert (tmp_path / "journal.jsonl").read_bytes() == whole


def test_a_cut_header_is_a_fresh_start(tmp_path: Path) -> None:
    with journal(tmp_path):
        pass
    whole = (tmp_path / "journal.jsonl").read_bytes()
    for cut in (0, 1, len(whole) - 1):
        (tmp_path / "journal.jsonl").write_bytes(whole[:cut])
        with journal(tmp_path):
            pass
        assert (tmp_path / "journal.jsonl").read_bytes() == whole


def test_another_search_is_refused_and_named(tmp_path: Path) -> None:
    with journal(tmp_path):
        pass
    with pytest.raises(JournalError, match="a search with calibration abc, now it is xyz; choose another --work-dir"):
        journal(tmp_path, calibration="xyz")


def test_damage_in_the_middle_is_refused(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.add_evaluation("a", EVALUATION)
    content = (tmp_path / "journal.jsonl").read_bytes()
    for damage in (b"not json\n", b'{"set": "a"}\n', b'{"set": "a", "pattern": "SS", "repeat": 0}\n'):
        (tmp_path / "journal.jsonl").write_bytes(content + damage)
        with pytest.raises(JournalError, match="line 3 is damaged"):
            journal(tmp_path)


def test_every_changed_byte_is_damage(tmp_path: Path) -> None:
    """One digit of a loss, a line that is gone, two that changed places: what does not check is not believed."""
    with journal(tmp_path) as first:
        for part in "abc":
            first.add_evaluation(part, EVALUATION)
    path = tmp_path / "journal.jsonl"
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(500):
        place = rng.randrange(len(content) - 1)
        changed = bytes([content[place] ^ (1 << rng.randrange(8))])
        path.write_bytes(content[:place] + changed + content[place + 1 :])
        with pytest.raises(JournalError, match="is damaged; --restart discards the file"):
            journal(tmp_path)
    lines = content.splitlines(keepends=True)
    for order in ([0, 1, 3], [0, 2, 1, 3], [1, 2, 3], [0, 1, 1, 2, 3]):
        path.write_bytes(b"".join(lines[number] for number in order))
        with pytest.raises(JournalError, match="is damaged"):
            journal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"losses": [0.3]}, " is damaged"),
        ({"losses": ["0.3", "0.1"]}, " is damaged"),
        ({"rows": [0, 0]}, " is damaged"),
        ({"rows": [-1, 0]}, " is damaged"),
        ({"tokens": [0, 6]}, " is damaged"),
        ({"rows": [], "losses": [], "correct": [], "tokens": [], "layer_tokens": []}, " is damaged"),
        ({"pattern": "SFF"}, f": {BEGINS_SHARED}"),
        ({"pattern": "FSC+2c4"}, ": indexer is '2c4', but C layers .candidates. are not supported since version 0.2.0"),
        ({"more": 1}, " is damaged"),
    ],
)
def test_a_line_that_checks_and_says_nonsense_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    record = {"set": "a", "pattern": "FSF", "repeat": 0, "rows": [2, 0], "losses": [0.3, 0.1], "correct": [3, 4]}
    record |= {"tokens": [5, 6], "layer_tokens": [7, 8], "seconds": 0.25}
    sealer = Sealer()
    header = {"identity": IDENTITY, "facts": {"created": "2026-11-21"}}
    (tmp_path / "journal.jsonl").write_bytes(sealer.seal(header) + sealer.seal({**record, **changes}))
    with pytest.raises(JournalError, match=f"line 2{message}"):
        journal(tmp_path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        sealer.seal({"losses": [float("nan")]})


def test_restart_begins_afresh(tmp_path: Path) -> None:
    with journal(tmp_path) as first:
        first.add_evaluation("a", EVALUATION)
    with Journal(tmp_path, IDENTITY, {"created": "later"}, restart=True) as afresh:
        assert afresh.evaluation("a", Pattern("FSF")) is None and afresh.facts == {"created": "later"}
