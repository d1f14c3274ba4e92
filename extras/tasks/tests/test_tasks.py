"""Generated tasks: what a sample holds, and that its answers are right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from indexcache_search import demo, evaluate
from indexcache_search.data.reader import TokenReader
from indexcache_search.errors import DataError
from indexcache_search.eval import tasks as core
from indexcache_search.eval.held_out import haystack_of
from indexcache_search.hf.loading import load_tokenizer
from indexcache_search.searching.show import JUDGED
from indexcache_tasks import cli, tasks


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(demo.MODEL))


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_sample_fills_its_context_and_holds_what_it_asks_for(task: str, tokenizer: Any) -> None:
    haystack = tokenizer.encode("All is quiet on the northern shore. " * 400, add_special_tokens=False)
    sample = tasks.sample(task, tokenizer, haystack, 1500, 3, chat=False)
    assert len(sample.tokens) == len(sample.mask) == 1500
    first = int(np.flatnonzero(sample.mask)[0])
    assert sample.mask[first:].all() and not sample.mask[:first].any()
    prompt, answer = (tokenizer.decode(part) for part in (sample.tokens[:first], sample.tokens[first:]))
    assert "quiet on the northern shore" in prompt and "Question:" in prompt
    assert all(one in prompt and one in answer for one in sample.answers)
    again = tasks.sample(task, tokenizer, haystack, 1500, 3, chat=False)
    other = tasks.sample(task, tokenizer, haystack, 1500, 4, chat=False)
    assert (again.tokens == sample.tokens).all() and other.answers != sample.answers


def test_the_answers_of_tasks_are_right() -> None:
    puzzle = tasks.variable_tracking(random.Random(1))
    values: dict[str, str] = {}
    for line in puzzle.needles:
        _, name, _, *value = line.split()
        values[name] = values[value[-1]] if value[0] == "VAR" else value[0]
    asked = puzzle.question.split()[-1].strip("?")
    assert sorted(name for name, value in values.items() if value == asked) == sorted(puzzle.answers)
    puzzle = tasks.common_words(random.Random(1))
    words = [needle.strip() for needle in puzzle.needles]
    assert set(sorted(set(words), key=words.count)[-3:]) == set(puzzle.answers)
    assert {words.count(answer) for answer in puzzle.answers} == {12}
    for seed in range(20):
        puzzle = tasks.mrcr(random.Random(seed))
        _, _, _, number, _, about, topic, _ = puzzle.question.split()
        assert about == "about" and len(puzzle.needles) == 8
        notes = [needle for needle in puzzle.needles if f"note about {topic}.\n" in needle]
        place = ["first", "second", "third", "fourth"].index(number)
        assert len(notes) == 4 and f"Note: {puzzle.answers[0]}.\n" in notes[place]


def test_lines_that_must_keep_their_order_do(tokenizer: Any) -> None:
    haystack = tokenizer.encode("All is quiet on the northern shore. " * 400, add_special_tokens=False)
    for task in ("variable_tracking", "mrcr"):
        for seed in range(5):
            puzzle = tasks.TASKS[task](random.Random(f"{task} {seed}"))
            text = tokenizer.decode(tasks.sample(task, tokenizer, haystack, 1500, seed, chat=False).tokens)
            places = [text.index(needle) for needle in puzzle.needles]
            assert puzzle.ordered and places == sorted(places)


def test_tasks_without_room_are_refused(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"multi_key: needs .* --seq-len is 128"):
        tasks.sample("multi_key", tokenizer, [1] * 4000, 128, 0, chat=False)
    with pytest.raises(DataError, match="haystack has 10 tokens"):
        tasks.sample("multi_key", tokenizer, [1] * 10, 1500, 0, chat=False)
    with pytest.raises(DataError, match="--tasks chat"):
        tasks.sample("multi_key", tokenizer, [1] * 4000, 1500, 0, chat=True)


def test_without_the_extension_tasks_are_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "extensions", lambda group, kind: {})
    with pytest.raises(DataError, match="--tasks needs an extension that is not installed"):
        evaluate(model=model_folder, patterns="FSSFSS", tasks=("mrcr",), seq_len=32, output=tmp_path / "out")


def written(folder: Path, *more: str) -> int | None:
    words = ["--model", str(demo.MODEL), "--seq-len", "1500", "--output", str(folder), "--samples", "2", *more]
    code: int | None = cli.app(words, prog_name="tasks", standalone_mode=False)
    return code


def test_samples_for_a_search_are_others_than_those_of_a_comparison(tmp_path: Path, tokenizer: Any) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text(json.dumps({"text": "All is quiet on the northern shore. " * 400}) + "\n")
    for seed in ("0", "1"):
        written(tmp_path / seed, "--tasks", "mrcr,multi_key", "--haystack", str(source), "--seed", seed)
    assert {path.name for path in (tmp_path / "1").iterdir()} == {"mrcr.jsonl", "multi_key.jsonl"}
    reader = TokenReader(lambda: tokenizer, 8192, 1500)
    seen = set()
    for path in sorted(tmp_path.glob("*/*.jsonl")):
        rows = [section for [section] in reader.documents(str(path), 0)]
        assert [len(row.tokens) for row in rows] == [1500, 1500]
        for row in rows:
            assert 0 < row.mask.sum() < 200 and row.mask[-1]
        seen |= {row.tokens.tobytes() for row in rows}
    haystack = haystack_of(reader, str(source), 1500)
    for task in ("mrcr", "multi_key"):
        seen |= {tasks.sample(task, tokenizer, haystack, 1500, n, chat=False).tokens.tobytes() for n in range(2)}
    assert len(seen) == 12


def test_nothing_is_overwritten_and_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mrcr.jsonl").write_text("mine")
    bad = {
        (): "is not empty",
        ("--tasks", "nothing"): "there is no 'nothing', expected multi_key",
        ("--tasks", "mrcr,mrcr"): "mrcr stands there twice",
        ("--output", str(tmp_path / "new"), "--haystack", str(tmp_path / "none.jsonl")): "no such file",
        ("--output", str(tmp_path / "new"), "--seq-len", "64"): "without any text around",
        ("--output", str(tmp_path / "mrcr.jsonl")): "is not empty",
    }
    for words, message in bad.items():
        assert written(tmp_path, *words) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and message in said
    assert [path.name for path in tmp_path.iterdir()] == ["mrcr.jsonl"]
    assert (tmp_path / "mrcr.jsonl").read_text() == "mine"


def test_tasks_that_a_search_advises_exist() -> None:
    assert cli.names(JUDGED)
