"""From which documents the sets of a run come: apart, spread over documents, and what is said about repeats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from indexcache_search import demo
from indexcache_search.cli import search
from indexcache_search.data import turns
from indexcache_search.data.packing import Packer, Wish
from indexcache_search.data.reader import WHOLE, TokenReader
from indexcache_search.data.shapes import Section
from indexcache_search.data.tokens import TokenSet
from indexcache_search.data.turns import Document, in_turn
from indexcache_search.errors import DataError
from indexcache_search.hf.loading import describe_model
from indexcache_search.searching.begin import token_sets
from indexcache_search.searching.job import SearchData
from indexcache_train import cli as distill
from sglang_indexcache.families import describe
from tests.conftest import tiny_config

MODEL = describe(tiny_config(), "tiny")
SEQ_LEN = 32
STRIDE = 1 << 14  # token ids of a document


def documents(*lengths: int) -> list[list[int]]:
    """Documents whose token ids say which one they are of, and where they stand in it."""
    return [list(range(number * STRIDE, number * STRIDE + length)) for number, length in enumerate(lengths)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def writer(rows: list[list[int]], name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
        return str(tmp_path / name)

    return writer


def build(
    source: str, wanted: tuple[int, int], evaluation: str | None = None, seed: int = 0
) -> tuple[TokenSet, TokenSet, TokenReader]:
    """The held-out and the calibration set, of `wanted` sequences."""
    reader = TokenReader(lambda: pytest.fail("token ids need no tokenizer"), 1 << 24, SEQ_LEN)
    packer = Packer(reader, MODEL, SEQ_LEN)
    held_out = packer.held_out([evaluation or source], wanted[0], [source])
    return held_out, packer.collect([source], wanted[1], seed, "calibration"), reader


def of(data: TokenSet) -> list[int]:
    """The documents of each token."""
    return (data.tokens // STRIDE).ravel().tolist()


def test_whole_documents_are_set_aside_and_sequences_spread(write: Callable[..., str]) -> None:
    """Before, all sequences of both sets came from the first document of the shuffled order."""
    source = write(documents(*[3500] * 8))
    for seed in range(3):
        held_out, calibration, reader = build(source, (32, 32), seed=seed)
        assert len({*of(held_out)}) == len({*of(calibration)}) == 4
        assert not {*of(held_out)} & {*of(calibration)}
        assert {of(data).count(document) for data in (held_out, calibration) for document in of(data)} == {8 * SEQ_LEN}
        assert [reading.used for reading in reader.readings] == [4, 4]
        for tokens in [*held_out.tokens, *calibration.tokens]:
            assert (np.diff(tokens) == 1).all()  # a sequence of a long document is a piece of it


@pytest.mark.parametrize("length", [400, 100])
def test_each_sequence_is_of_its_own_document_where_there_are_enough(write: Callable[..., str], length: int) -> None:
    held_out, calibration, _ = build(write(documents(*[length] * 40)), (12, 20))
    assert len({*of(held_out)}) == 12 and len({*of(calibration)}) == 20


def test_the_held_out_set_depends_on_nothing_but_its_size(write: Callable[..., str]) -> None:
    source = write(documents(*range(10, 900, 30)))
    first = build(source, (6, 6))[0]
    for wanted, seed in (((6, 1), 0), ((6, 20), 1), ((6, 3), 2)):
        assert build(source, wanted, seed=seed)[0].sha256 == first.sha256


def test_documents_that_share_a_part_are_in_one_set_each(write: Callable[..., str]) -> None:
    """As conversations with the same tools: what they share counts once, and takes no document into the other set."""
    shared = list(range(50 * STRIDE, 50 * STRIDE + SEQ_LEN))
    held_out, calibration, _ = build(write([shared + row for row in documents(*[70] * 8)]), (6, 6))
    assert not ({*of(held_out)} - {50}) & ({*of(calibration)} - {50})
    assert (50 in of(held_out)) + (50 in of(calibration)) <= 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=25), st.integers(1, 8), st.integers(1, 8), st.integers(0, 5))
def test_no_document_is_in_both(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], held: int, calibrated: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("documents") / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in documents(*lengths)))
    try:
        held_out, calibration, reader = build(str(path), (held, calibrated), seed=seed)
    except DataError as error:
        assert "\n" not in str(error)
        return
    assert not {*of(held_out)} & {*of(calibration)}
    assert [reading.used for reading in reader.readings] == [len({*of(data)}) for data in (held_out, calibration)]


@pytest.mark.parametrize(("lengths", "its"), [([3500], "only document is"), ([60, 60], "2 documents are")])
def test_text_that_would_be_in_both_sets_is_refused(write: Callable[..., str], lengths: list[int], its: str) -> None:
    source = write(documents(*lengths))
    with pytest.raises(DataError, match=f"its {its} set aside for evaluation, .*expected --evaluation FILE") as caught:
        build(source, (2, 2))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["sub/../rows.jsonl", "", "link.jsonl"])
def test_a_source_is_known_by_another_name(write: Callable[..., str], tmp_path: Path, name: str) -> None:
    """A folder that holds it, a link to it: documents are set aside all the same."""
    source = write(documents(*[300] * 8))
    (tmp_path / "sub").mkdir()
    if name == "link.jsonl":
        (tmp_path / "elsewhere").mkdir()
        tmp_path = tmp_path / "elsewhere"
        (tmp_path / name).symlink_to(source)
    held_out, calibration, reader = build(source, (16, 16), evaluation=f"{tmp_path}/{name}")
    assert len({*of(held_out)}) == len({*of(calibration)}) == 4
    assert reader.readings[1].aside and not reader.readings[1].held_out


def test_a_given_number_takes_further_documents_and_a_default_one_does_not(write: Callable[..., str]) -> None:
    source = write(documents(*[SEQ_LEN] * 10))
    held_out, calibration, _ = build(source, (8, 2))
    assert held_out.num_sequences == 8 and calibration.num_sequences == 2
    held_out, calibration, reader = build(source, (Wish(8), Wish(32)))
    assert held_out.num_sequences == calibration.num_sequences == 5
    assert reader.notes == (
        f"{source}: gives 5 evaluation sequences, fewer than the default of 8; all are used",
        f"{source}: gives 5 calibration sequences, fewer than the default of 32; all are used",
    )
    with pytest.raises(DataError, match=r"gives 5 calibration sequences of 32 tokens, 6 were asked for"):
        build(source, (Wish(8), 6))
    with pytest.raises(DataError, match="gives 0 evaluation sequences"):
        build(write(documents(9, 9)), (Wish(1), Wish(2)))


def test_a_set_of_one_document_is_said(write: Callable[..., str]) -> None:
    source, other = write(documents(900)), write([row[::-1] for row in documents(*[40] * 9)], "other.jsonl")
    _, _, reader = build(source, (2, 3), evaluation=other)
    assert reader.notes == (f"{source}: all 3 calibration sequences come from one document",)


# -- repeats


def test_repeated_rows_are_counted(write: Callable[..., str]) -> None:
    rows = documents(*[SEQ_LEN] * 8)
    source = write(rows[:6] * 4, "rows.jsonl")
    other = write(rows[4:], "held-out.jsonl")
    held_out, calibration, reader = build(source, (4, 4), evaluation=other)
    assert sorted({*of(calibration)}) == [0, 1, 2, 3] and sorted({*of(held_out)}) == [4, 5, 6, 7]
    with pytest.raises(DataError, match=r"rows read: 24, 18 repeat earlier text, 2 are in the evaluation set, too;"):
        build(source, (4, 5), evaluation=other)
    reading = reader.readings[1]
    assert reading.repeats + reading.held_out + 4 == reading.rows.total() and reading.held_out <= 2
    assert (
        f"{source}: {reading.repeats} of {reading.rows.total()} calibration rows read repeat earlier text"
        in " ".join(reader.notes)
    )


def test_a_row_may_repeat_itself(write: Callable[..., str]) -> None:
    """As a conversation that is written once for each of its replies; no other row says the same."""
    source = write([row * 2 for row in documents(*[WHOLE * SEQ_LEN] * 3)])
    other = write([row[::-1] for row in documents(*[40] * 9)], "other.jsonl")
    _, _, reader = build(source, (2, 2), evaluation=other)
    found = reader.readings[1].rows.total()
    assert reader.notes == (
        f"{source}: {found} of {found} calibration rows read repeat earlier text, all or a part; what repeats counts"
        " once",
    )


def test_what_is_set_aside_is_no_repeat(write: Callable[..., str]) -> None:
    source = write(documents(*[SEQ_LEN] * 8))
    _, _, reader = build(source, (4, 4))
    assert [(item.repeats, item.held_out) for item in reader.readings] == [(0, 0), (0, 0)] and not reader.notes
    _, _, reader = build(write(documents(*[SEQ_LEN] * 8) * 2), (4, 4))
    assert reader.readings[1].held_out == 0 and reader.readings[1].repeats > 0


def test_repeats_do_not_use_up_what_is_left_for_calibration(write: Callable[..., str]) -> None:
    """Copies of a document that stays for calibration don't bring it into the evaluation set."""
    held_out, calibration, _ = build(write(documents(*[600] * 8) * 5), (32, 32))
    assert len({*of(held_out)}) == len({*of(calibration)}) == 4 and not {*of(held_out)} & {*of(calibration)}


def test_identical_rows_say_why_they_give_so_little(write: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"gives 1 evaluation sequences .*rows read: 40, 39 repeat earlier text;"):
        build(write(documents(SEQ_LEN) * 40), (2, 2))


# -- the order


def sections(lengths: list[int]) -> list[Document]:
    """Documents of so many sections of two tokens."""
    flags = np.ones(2, np.bool_)
    return [
        Document(number, [Section(np.full(2, place), flags) for place in range(length)])
        for number, length in enumerate(lengths)
    ]


def test_documents_take_turns() -> None:
    found = [(number, int(section.tokens[0])) for number, section in in_turn(sections([1, 3, 0, 2]))]
    assert found == [(0, 0), (1, 0), (3, 0), (1, 1), (3, 1), (1, 2)]


def test_documents_that_are_held_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training set of long documents does not keep them all in memory."""
    monkeypatch.setattr(turns, "HELD_TOKENS", 10)
    begun = 0

    def counted() -> Any:
        nonlocal begun
        for document in sections([4] * 100):
            begun += 1
            yield document

    for used, _ in enumerate(in_turn(counted()), 1):
        left = 8 * begun - 2 * used
        assert left <= 10 + 8
    assert used == 400


def test_long_documents_are_cut_and_others_stay_whole(write: Callable[..., str]) -> None:
    source = write(documents(WHOLE * SEQ_LEN, WHOLE * SEQ_LEN + 1))
    reader = TokenReader(lambda: None, 1 << 24, SEQ_LEN)
    found = sorted([len(section.tokens) for section in document] for document in reader.documents(source, 0))
    assert found == [[SEQ_LEN] * WHOLE + [1], [WHOLE * SEQ_LEN]]


def test_the_demo_has_the_sequences_of_its_figures() -> None:
    """docs/evidence/demo.md and the patterns in the package are of these."""
    description = describe_model(str(demo.MODEL))
    data = SearchData(
        calibration=demo.CALIBRATION, evaluation=demo.EVALUATION, seq_len=512, num_sequences=32, num_eval_sequences=48
    )
    _, calibration, held_out = token_sets(str(demo.MODEL), description, data, 512)
    assert calibration.sha256.startswith("504cff993a61f46f") and held_out.sha256.startswith("1da0a92fcaf163c5")


# -- on the command line


def test_a_dry_run_says_from_how_many_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write([[token % 900 for token in np.random.default_rng(n).integers(0, 900, 900).tolist()] for n in range(6)] * 2)
    words = ["--dry-run", "--calibration", "rows.jsonl", "--seq-len", "128", "--num-sequences", "6"]
    result = CliRunner().invoke(search.app, [*words, "--num-eval-sequences", "4"])
    assert result.exit_code == 0, result.output
    assert "evaluation: 4 sequences of 128 tokens, from 3 documents, " in result.output
    assert "calibration: 6 sequences of 128 tokens, from 3 documents, " in result.output
    assert "rows.jsonl: 6 sequences, from 3 documents, " in result.output
    assert (
        "calibration rows read repeat earlier text" in result.output
        and " 3 are set aside for evaluation" in result.output
    )


@pytest.mark.parametrize("given", [(), ("--num-sequences", "16384")], ids=["default", "given"])
def test_a_default_number_is_a_wish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., str], given: tuple[str, ...]
) -> None:
    """16384 training sequences were asked for by nobody."""
    monkeypatch.chdir(tmp_path)
    write([np.random.default_rng(number).integers(0, 900, 400).tolist() for number in range(9)])
    words = ["--dry-run", "--training", "rows.jsonl", "--model", str(demo.MODEL), "--seq-len", "128", *given]
    result = CliRunner().invoke(distill.app, words)
    if given:
        assert result.exit_code == 2 and "training sequences of 128 tokens, 16384 were asked for" in result.output
    else:
        assert result.exit_code == 0, result.output
        assert "training sequences, fewer than the default of 16384; all are used" in result.output
        assert "evaluation sequences, fewer than the default of 32; all are used" in result.output
