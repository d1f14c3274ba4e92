"""Search, compare and try patterns from Python: what the commands do, without their printing."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import indexcache_search
from indexcache_search import Budget, RunSettings, apply, data, evaluate, search
from indexcache_search.cli.evaluate import evaluate as compare
from indexcache_search.cli.search import search as command
from sglang_indexcache import IndexCacheError, Pattern, PatternFile
from sglang_indexcache.io.messages import OTHER_LENGTH
from tests.conftest import LAYERS, TOPK, VOCAB, save_model, tiny_config, tiny_model
from tests.search.test_command_lines import invoke

SIZES: dict[str, Any] = {"seq_len": 32, "num_sequences": 2, "num_eval_sequences": 2, "retain": "1/2"}


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, 4 * TOPK), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def found(model_folder: Path, token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("found")
    search(model=model_folder, calibration=token_file, output=folder, **SIZES)
    return folder


def written(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "metrics.json").read_text())
    for timed in (content, content["cost"]):
        timed.pop("seconds")
    content.pop("command", None)
    return content


@pytest.mark.usefixtures("no_pictures")
def test_a_search_returns_what_the_command_writes_and_prints_nothing(
    model_folder: Path, token_file: Path, found: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = search(model=model_folder, calibration=[token_file], output=tmp_path / "api", **SIZES)
    assert capfd.readouterr() == ("", "")
    assert result.as_json() == json.loads((tmp_path / "api" / "metrics.json").read_text())
    words = ["--model", str(model_folder), "--calibration", str(token_file), "--output", str(tmp_path / "cli")]
    for name, value in SIZES.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    done = invoke(command, words)
    assert done.exit_code == 0, done.stderr
    assert written(tmp_path / "cli") == written(tmp_path / "api") == written(found)


@pytest.mark.usefixtures("no_pictures")
def test_a_search_goes_on_where_it_was(
    model_folder: Path, token_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = search(model=model_folder, calibration=token_file, output=tmp_path / "out", **SIZES)
    lines = (tmp_path / "out" / "work" / "journal.jsonl").read_text().count("\n")
    again = search(model=model_folder, calibration=token_file, output=tmp_path / "out", progress=True, **SIZES)
    assert again.pattern_file == first.pattern_file
    assert (tmp_path / "out" / "work" / "journal.jsonl").read_text().count("\n") == lines
    assert capfd.readouterr().err  # as it was asked to say something


@pytest.mark.usefixtures("no_pictures")
def test_patterns_are_compared(model_folder: Path, token_file: Path, found: Path, tmp_path: Path) -> None:
    result = evaluate(
        model=model_folder,
        patterns=[found / "pattern.yaml", "mine=FSFSFS"],
        evaluation=token_file,
        retain=Fraction(1, 2),
        seq_len=32,
        num_sequences=4,
        uniform=False,
        output=tmp_path / "compared",
        run=RunSettings(dtype="float32", device="cpu"),
    )
    assert json.loads((tmp_path / "compared" / "eval.json").read_text())["schema"] == result.schema_
    assert "mine" in [row.name for row in result.held_out.rows]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"strategy": "best"}, "strategy is 'best', expected one of lazy"),
        ({"strategy_settings": {"hops": 1}}, "strategy_settings: .*hops"),
        ({"retain": "1/0"}, "retention is"),
        ({"calibration": "no-such-file.jsonl"}, "no-such-file"),
    ],
)
def test_what_can_not_be_met_is_one_line(
    wrong: dict[str, Any], line: str, model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    given = {"model": model_folder, "calibration": token_file, "output": tmp_path / "out", **SIZES, **wrong}
    with pytest.raises(IndexCacheError, match=line) as error:
        search(**given)
    assert "\n" not in str(error.value)


def test_a_model_runs_a_pattern_for_a_while(tokens: torch.Tensor) -> None:
    model = tiny_model(tiny_config())
    with torch.inference_mode():
        before = model(tokens).logits
        with apply(model, "F" * LAYERS):
            assert torch.equal(model(tokens).logits, before)
        with apply(model, Pattern.parse("FSSFSS")):
            assert not torch.equal(model(tokens).logits, before)
        assert torch.equal(model(tokens).logits, before)


def test_a_model_is_as_it_was_after_an_error(tokens: torch.Tensor) -> None:
    model = tiny_model(tiny_config())
    with torch.inference_mode():
        before = model(tokens).logits
        with pytest.raises(ValueError, match="mine"), apply(model, "FSSFSS"):
            raise ValueError("mine")
        with apply(model, "FSSFSS"), pytest.raises(RuntimeError, match="already"), apply(model, "FSFSFS"):
            pass
        assert torch.equal(model(tokens).logits, before)


def test_a_pattern_file_is_for_its_model(model_folder: Path, found: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for named in (found / "pattern.yaml", f"{found / 'pattern.yaml'}@1/2", PatternFile.load(found / "pattern.yaml")):
        with apply(model, named):
            pass
    other = AutoModelForCausalLM.from_pretrained(save_model(tiny_config(index_topk=2 * TOPK), tmp_path / "other"))
    with pytest.raises(IndexCacheError, match="index_topk"), apply(other, found / "pattern.yaml"):
        pass
    with pytest.raises(IndexCacheError, match=OTHER_LENGTH.format(2, 6)), apply(model, "FS"):
        pass


def test_nothing_is_taken_by_position() -> None:
    for function in (search, evaluate):
        kinds = {item.kind for item in inspect.signature(function).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}


def test_no_module_takes_the_place_of_a_function() -> None:
    """A submodule becomes an attribute of its package once it is imported."""
    for item in pkgutil.iter_modules(indexcache_search.__path__, "indexcache_search."):
        importlib.import_module(item.name)
    assert all(callable(getattr(indexcache_search, name)) for name in indexcache_search.__all__)
    with pytest.raises(AttributeError, match="no attribute 'find'"):
        indexcache_search.find  # noqa: B018


@pytest.mark.parametrize(("number", "blocks"), [(3, False), (5, True)])
def test_a_default_number_of_sequences_is_one_for_python_and_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, blocks: bool
) -> None:
    """Each stood twice, and in the help a third time, so that one of them could be changed alone."""
    asked: list[Any] = []
    monkeypatch.setattr("indexcache_search.searching.run.run", lambda job: asked.append(job.data) or sys.exit())
    name = "SEARCHED_IN_TIME" if blocks else "SEARCHED"
    for module in ("indexcache_search.api", "indexcache_search.cli.search"):
        monkeypatch.setattr(f"{module}.{name}", number)
        monkeypatch.setattr(f"{module}.JUDGED", number + 1)
    with pytest.raises(SystemExit):
        prefill = Budget(0.5, 131_072) if blocks else None
        search(model="m", calibration="c", output=tmp_path, prefill=prefill)
    given = ["--model", "m", "--calibration", "c", "--output", str(tmp_path)]
    invoke(command, [*given, *(["--prefill", "0.5"] if blocks else [])])
    assert [(data.num_sequences, data.num_eval_sequences) for data in asked] == [(number, number + 1)] * 2


def test_help_and_the_reference_say_the_default_numbers_of_sequences() -> None:
    text = " ".join(invoke(command, ["--help-all"]).output.split())
    assert f"Default: {data.SEARCHED}, with --prefill {data.SEARCHED_IN_TIME}." in text
    assert f"Held-out sequences. Default: {data.JUDGED}, for the demo" in text
    compared = " ".join(invoke(compare, ["--help"]).output.split())
    assert f"Sequences, of all sources together. Default: {data.COMPARED}, for the demo" in compared
    assert f"by default {data.SEARCHED}, of which" in str(search.__doc__)
    assert f"by default {data.COMPARED}, of which" in str(evaluate.__doc__)
