"""Calibration data: sources, packing, disjointness, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from indexcache_search import demo
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from sglang_indexcache.families import describe
from tests.conftest import TOPK, VOCAB, tiny_config

MODEL = describe(tiny_config(), "tiny")
SEQ_LEN = 24


def no_tokenizer() -> Any:
    raise AssertionError("token ids need no tokenizer")


def build(*sources: str, reader: TokenReader | None = None, **options: Any) -> tuple[TokenSet, TokenSet]:
    given = {"seq_len": SEQ_LEN, "num_calibration": 3, "num_evaluation": 2, "seed": 0, **options}
    packer = Packer(reader or TokenReader(no_tokenizer, VOCAB, given["seq_len"]), MODEL, given["seq_len"])
    held_out = packer.held_out(given.get("evaluation", sources), given["num_evaluation"])
    return packer.collect(sources, given["num_calibration"], given["seed"], "calibration"), held_out


def rows_of(count: int, length: int = SEQ_LEN, seed: int = 0) -> list[list[int]]:
    rows: list[list[int]] = np.random.default_rng(seed).integers(3, VOCAB, (count, length)).tolist()
    return rows


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def writer(rows: list[Any], name: str = "rows.jsonl") -> str:
        lines = [json.dumps(row if isinstance(row, dict) else {"input_ids": row}) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return writer


def as_rows(data: TokenSet) -> set[tuple[int, ...]]:
    return {tuple(row) for row in data.tokens.tolist()}


def test_rows_of_the_right_length_stay_whole_and_sets_are_disjoint(write: Callable[..., str]) -> None:
    rows = rows_of(12)
    calibration, held_out = build(write(rows))
    assert calibration.tokens.shape == (3, SEQ_LEN) and held_out.tokens.shape == (2, SEQ_LEN)
    assert as_rows(calibration) | as_rows(held_out) <= {tuple(row) for row in rows}
    assert not as_rows(calibration) & as_rows(held_out)


def test_only_targets_behind_index_topk_are_scored(write: Callable[..., str]) -> None:
    calibration, _ = build(write(rows_of(6)))
    assert not calibration.scored[:, : TOPK + 1].any()
    assert calibration.scored[:, TOPK + 1 :].all()
    assert calibration.scored_tokens == 3 * (SEQ_LEN - TOPK - 1)


def test_held_out_set_does_not_depend_on_the_seed_but_calibration_does(write: Callable[..., str]) -> None:
    source = write(rows_of(40))
    first, again, other = (build(source, seed=seed) for seed in (0, 0, 1))
    assert first[0].sha256 == again[0].sha256 != other[0].sha256
    assert first[1].sha256 == again[1].sha256 == other[1].sha256
    assert build(source, num_calibration=9)[1].sha256 == first[1].sha256


def test_repeated_documents_never_fall_into_both_sets(write: Callable[..., str]) -> None:
    rows = rows_of(5)
    calibration, held_out = build(write(rows * 10))
    assert len(as_rows(calibration)) == 3 and len(as_rows(held_out)) == 2
    assert not as_rows(calibration) & as_rows(held_out)


def test_repeats_across_sources_count_too(write: Callable[..., str]) -> None:
    rows = rows_of(8)
    calibration, held_out = build(write(rows, "a.jsonl"), evaluation=[write(rows, "b.jsonl")])
    assert not as_rows(calibration) & as_rows(held_out)


def test_one_long_document_is_cut_into_sections(write: Callable[..., str]) -> None:
    [row] = rows_of(1, SEQ_LEN * 16)
    calibration, _ = build(write([row]), num_calibration=16, evaluation=[write(rows_of(4, seed=1), "other.jsonl")])
    assert as_rows(calibration) == {tuple(row[start : start + SEQ_LEN]) for start in range(0, len(row), SEQ_LEN)}


def test_short_documents_are_packed(write: Callable[..., str]) -> None:
    rows = rows_of(60, 5)
    calibration, _ = build(write(rows))
    stream = calibration.tokens[0].tolist()
    assert all(stream[start : start + 5] in rows for start in range(0, 20, 5))


def test_loss_mask_decides_what_is_scored(write: Callable[..., str]) -> None:
    mask = [0] * 10 + [1, 0] * 7
    calibration, _ = build(write([{"input_ids": row, "loss_mask": mask} for row in rows_of(6)]))
    assert (calibration.scored == np.asarray(mask, bool)).all()
    early = [1] * TOPK + [0] * (SEQ_LEN - TOPK)
    with pytest.raises(DataError, match="gives 0 evaluation sequences"):
        build(write([{"input_ids": row, "loss_mask": early} for row in rows_of(6)]))


def test_sources_share_sequences_evenly(write: Callable[..., str]) -> None:
    sources = [write(rows_of(9, seed=seed), f"{seed}.jsonl") for seed in range(2)]
    calibration, _ = build(*sources)
    assert calibration.source_of.tolist() == [0, 0, 1]
    assert calibration.sources == tuple(sources)
    with pytest.raises(DataError, match="1 evaluation sequences from 2 sources"):
        build(*sources, num_evaluation=1)


def test_parquet_text_files_and_folders(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    words = "In the beginning was the word and the word was with the code. "
    rng = np.random.default_rng(0)
    texts = [
        f"Chapter {number}. {words}" + " ".join(f"word{one}" for one in rng.integers(0, 999, 150))
        for number in range(12)
    ]
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sets = []
    for source in (folder, tmp_path / "texts.parquet", tmp_path / "texts.jsonl"):
        reader = TokenReader(lambda: tokenizer, tokenizer.vocab_size, 200)
        sets.append(build(str(source), reader=reader, seq_len=200, num_calibration=8)[0])
    for data in sets:
        assert "word was with the code" in tokenizer.decode(data.tokens[0].tolist())
        assert (data.tokens == tokenizer.eos_token_id).any()  # documents are kept apart
    assert len({data.sources for data in sets}) == 3


def test_messages_go_through_the_chat_template(write: Callable[..., str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    rows = [{"messages": [{"role": "user", "content": f"question {n} " * 20}]} for n in range(30)]
    reader = TokenReader(lambda: tokenizer, tokenizer.vocab_size, SEQ_LEN)
    with pytest.raises(DataError, match=r"rows.jsonl: line \d+: .*no chat template; expected --rows chat_template="):
        build(write(rows), reader=reader)
    tokenizer.chat_template = "{% for m in messages %}<|key|>{{ m.content }}{% endfor %}"
    calibration, _ = build(write(rows), reader=TokenReader(lambda: tokenizer, tokenizer.vocab_size, SEQ_LEN))
    assert "question" in tokenizer.decode(calibration.tokens[0].tolist())


@pytest.mark.parametrize("seq_len", [1, TOPK, TOPK + 1])
def test_sequences_not_longer_than_index_topk_are_refused(write: Callable[..., str], seq_len: int) -> None:
    with pytest.raises(
        DataError, match=rf"--seq-len is {seq_len}, .*position {TOPK} .index_topk is {TOPK}..*at least {TOPK + 2}"
    ):
        build(write(rows_of(6)), seq_len=seq_len)


def test_too_little_text_says_how_much_there_is(write: Callable[..., str]) -> None:
    with pytest.raises(DataError, match="gives 4 calibration sequences of 24 tokens, 9 were asked for"):
        build(write(rows_of(6)), num_calibration=9)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "text"}, "line 1: columns are title, expected one of: input_ids; messages or conversations; "),
        ({"text": None}, "line 1: text is null, expected a value; --rows skip_bad=N skips up to N such rows"),
        ({"input_ids": [1, VOCAB]}, f"token id {VOCAB}, expected 0 to {VOCAB - 1}"),
        ({"input_ids": [1, -1]}, "expected 0 to"),
        ({"input_ids": ["a"]}, "not a list of integers"),
        ({"input_ids": 7}, "expected as many|not a list"),
        ({"input_ids": [3, 4, 5], "loss_mask": [1]}, "loss_mask has 1 entries, input_ids 3"),
        ({"text": 7}, "text is int, expected a string"),
    ],
)
def test_bad_rows_are_refused(write: Callable[..., str], row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build(write([row]))


def test_bad_sources_are_refused(tmp_path: Path, write: Callable[..., str]) -> None:
    (tmp_path / "broken.jsonl").write_text('{"input_ids": [1, 2\n')
    (tmp_path / "data.pdf").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    for source, message in (
        (str(tmp_path / "broken.jsonl"), "line 1: not JSON"),
        (str(tmp_path / "data.pdf"), "ending is .pdf, expected .jsonl, .*also with .gz or .zst"),
        (str(tmp_path / "empty"), "no file in this folder ends with .jsonl"),
        (str(tmp_path / "nothing.jsonl"), "no such file"),
        ("nothing", "not a hub id"),
        ("somebody/nothing", "somebody/nothing: no such file or folder here, and can't be read from the hub"),
        ("demo:nothing", "demo:nothing: no such set, expected one of calibration-recall"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            build(source)
        assert "\n" not in str(caught.value)


# -- text that was seen before


def test_documents_that_begin_elsewhere_never_fall_into_both_sets(write: Callable[..., str]) -> None:
    rows = rows_of(12, 4 * SEQ_LEN)
    calibration, held_out = build(
        write([[*row[1:], 5] for row in rows], "shifted.jsonl"), evaluation=[write(rows)], num_evaluation=8
    )
    shifted = {tuple(row[start : start + 12]) for row in held_out.tokens.tolist() for start in range(SEQ_LEN - 11)}
    assert not any(tuple(row[4:16]) in shifted for row in calibration.tokens.tolist())


def test_what_a_pattern_was_calibrated_on_is_left_out_of_a_held_out_set(write: Callable[..., str]) -> None:
    source = write(rows_of(60))
    calibration, _ = build(source, num_calibration=20)
    sketch = Sketch.decode(Sketch.of(calibration.tokens).encode())
    reader = TokenReader(no_tokenizer, VOCAB, SEQ_LEN)
    leaking, packer = Packer(reader, MODEL, SEQ_LEN), Packer(reader, MODEL, SEQ_LEN, [sketch])
    assert as_rows(leaking.held_out([source], 40)) & as_rows(calibration) and leaking.left_out == 0
    held_out = packer.held_out([source], 40)
    assert packer.left_out == 20 and not as_rows(held_out) & as_rows(calibration)
    with pytest.raises(DataError, match="gives 40 evaluation sequences"):
        Packer(reader, MODEL, SEQ_LEN, [sketch]).held_out([source], 41)


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(20, 600))
def test_sketches_know_their_texts_and_no_others(seed: int, count: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    texts, others = rng.integers(0, 5000, (2, count, length)).astype(np.int32)
    growing = Sketch(most=200)
    for text in texts:
        growing.add(text)
    for sketch in (growing, Sketch.decode(Sketch.of(texts).encode())):
        assert not any(sketch.covers(text) for text in others)
    assert len(growing._hashes) <= 200
    every = Sketch.decode(Sketch.of(texts[:1]).encode())
    assert every.covers(texts[0]) and every.covers(texts[0][1:]) and not every.covers(texts[0][:8])


# -- files


def test_names_are_no_patterns_for_names(write: Callable[..., str]) -> None:
    write(rows_of(9, seed=1), "data1.jsonl")
    right = build(write(rows_of(9, seed=2), "data[1].jsonl"))[0]
    assert as_rows(right) <= {tuple(row) for row in rows_of(9, seed=2)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("null\n", "line 1: found null, expected an object"),
        ('{"input_ids": [1]}\n[1, 2]\n', "line 2: found list"),
        ('{"input_ids": [1]}\n{"input_ids": [1\n', "line 2: not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"a": ' * 100_000, "line 1: not JSON"),
        ('{"input_ids": [1, 2.5, 3]}\n', "input_ids is not a list of integers"),
        ('{"input_ids": [1, "2", 3]}\n', "input_ids is not a list of integers"),
        ('{"input_ids": ["1", "2"]}\n', "input_ids is not a list of integers"),
        ('{"input_ids": [[1], [2, 3]]}\n', "input_ids is not a list of integers"),
        ('{"input_ids": [true, false]}\n', "input_ids is not a list of integers"),
        ('{"input_ids": 5}\n', "input_ids is not a list of integers"),
        ('{"input_ids": [5, -1, 7]}\n', "token id -1, expected 0 to 95"),
        ('{"input_ids": [9223372036854775808]}\n', "token id 9223372036854775808, expected 0 to 95"),
        ('{"input_ids": [99999999999999999999]}\n', "input_ids is not a list of integers"),
        ('{"input_ids": [5, 6], "loss_mask": [0.5, 1]}\n', "loss_mask is not a list of integers"),
        ('{"text": 5}\n', "text is int, expected a string"),
        (b'{"text": "caf\xe9"}\n', "line 1: holds a byte that is not UTF-8"),
    ],
)
def test_rows_that_are_none(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL) if b"text" in path.read_bytes() else None
    reader = TokenReader(lambda: tokenizer, VOCAB, SEQ_LEN)
    with pytest.raises(DataError, match=message) as caught:
        build(str(path), reader=reader)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_list_of_rows_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([{"input_ids": row} for row in rows_of(9)]))
    assert build(str(tmp_path / "x.json"))[0].num_sequences == 3
