"""indexcache-eval: tasks, servers, tables, refusals."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from indexcache_search import demo
from indexcache_search.cli.evaluate import app
from indexcache_search.eval import measure
from indexcache_search.eval.candidates import named_lines
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.hf.loading import describe_model, load_tokenizer
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.io.messages import OTHER_LENGTH
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from tests.http_stub import Answering, HttpStub


def run(*options: str) -> Any:
    return CliRunner().invoke(app, list(options))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(demo.MODEL))


# -- patterns


def options(model: Path, data: Path, folder: Path) -> list[str]:
    fixed = ["--model", model, "--evaluation", data, "--seq-len", "32", "--num-sequences", "6", "--output", folder]
    return [*map(str, fixed), "--device", "cpu"]


def test_patterns_are_compared_and_found_worse(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    file = write_pattern(Pattern("FSSFSS"), model_folder, tmp_path / "deploy.yaml")
    more = ["--pattern", f"{file}@1/3", "--pattern", "same=FFFFFF"]
    result = run(*options(model_folder, token_file, tmp_path / "out"), *more)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    rows = {(row["name"], row["retention"]): row for row in found["held_out"]["rows"]}
    assert {name for name, kept in rows if kept == "1/3"} >= {"deploy", "uniform phase 0", "uniform phase 2"}
    assert rows["deploy", "1/3"]["kl"]["mean"] > 0.0 == rows["baseline", "1"]["kl"]["mean"]
    same = rows["same", "1"]["by_source"][str(token_file)]
    assert same["increase"] == {"mean": 0.0, "stderr": 0.0, "degrees": 5} == same["accuracy_change"]
    shown = f"same: not shown to be worse: the loss rises by at most 0.0000 ({token_file})"
    assert shown in found["findings"] and shown in result.stdout
    assert (tmp_path / "out" / "eval.html").read_text().count("<svg") == 2
    assert rows["deploy", "1/3"]["served"] == f"--indexcache-pattern {file}@1/3" and "served" not in rows["same", "1"]
    page = (tmp_path / "out" / "eval.html").read_text()
    assert "--indexcache-pattern FSSFSS" not in page
    rise = Estimate(**rows["deploy", "1/3"]["increase"])
    assert rise.degrees == 5
    for allowed, code, said in (
        (rise.high + 1e-6, 0, None),
        (rise.high - 1e-6, 1, "deploy 1/3: not settled on"),
        (rise.low - 1e-6, 1, "deploy 1/3: worse on"),
    ):
        again = run(*options(model_folder, token_file, tmp_path / "out"), *more, "--max-increase", str(allowed))
        assert again.exit_code == code, again.output
        lines = [line for line in again.stderr.splitlines() if line.startswith("--max-increase")]
        assert bool(lines) == bool(code) and (said is None or said in lines[0])


def test_sequences_that_run_in_parts_give_the_same(
    model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = []
    for together in (24, 4):
        monkeypatch.setattr(measure, "TOGETHER", together)
        folder = tmp_path / str(together)
        result = run(*options(model_folder, token_file, folder), "--pattern", "a=FSSFSS", "--pattern", "uniform@1/2")
        assert result.exit_code == 0, result.output
        contents.append((folder / "eval.json").read_text())
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "expected either --pattern or --endpoint"),
        (["--pattern", "a=FFF"], OTHER_LENGTH.format(3, 6)),
        (["--pattern", "nowhere.yaml"], "nowhere.yaml"),
        (["--endpoint", "http://localhost:1"], "--endpoint: found one"),
        (["--pattern", "a=FSFSFS", "--tasks", "niah"], "'--tasks': there is no 'niah'"),
        (["--pattern", "a=FSFSFS", "--seq-len", "300"], "made for 256 tokens"),
        (["--endpoint", "http://localhost:1", "--endpoint", "http://localhost:1"], "http://localhost:1: /v1/models"),
    ],
)
def test_mistakes_get_one_line(
    model_folder: Path, token_file: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    given = options(model_folder, token_file, tmp_path / "out")
    result = run(*(given[:-2] if "--endpoint" in more else given), *more)  # servers have a device of their own
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("indexcache-eval: ") and message in lines[0]


def test_a_file_for_another_model_is_refused(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    file = write_pattern(Pattern.uniform(16, 2), demo.MODEL, tmp_path / "demo.yaml")
    result = run(*options(model_folder, token_file, tmp_path / "out"), "--pattern", file)
    assert result.exit_code == 2 and "model.num_layers: file has 16" in result.stderr


def test_names_are_no_markup_and_long_tables_are_several(
    model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder, a pattern and a source; on 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    folder, source = tmp_path / "x[/b] :x:", tmp_path / "[bold]s[/b].jsonl"
    source.parent.mkdir()
    source.write_bytes(token_file.read_bytes())
    file = write_pattern(Pattern("FSSFSS"), model_folder, tmp_path / "[red] a.yaml")
    more = ["--pattern", f"{file}@1/3", "--pattern", "b=FSSFSS"]
    result = run(*options(model_folder, source, folder), *more)
    assert result.exit_code == 0, result.output
    assert f"Wrote {folder / 'eval.json'}" in result.stdout
    lines = result.stdout.splitlines()
    assert sum("[red] a" in line for line in lines) >= 2
    assert max(len(line) for line in lines if line.startswith(("│", "┃"))) <= 60 and "increase" in result.stdout


# -- servers


class Stub(HttpStub):
    """An OpenAI-compatible server: token t has logprob -t / 100 / `factor`; it answers every question with `says`.

    With `serves` it is SGLang's with this pattern.
    """

    def __init__(self, factor: float, says: str, logprobs: bool = True, serves: str | None = None) -> None:
        stub = self
        self.asked: list[dict[str, Any]] = []

        class Handler(Answering):
            def get(self) -> None:
                if self.path == "/server_info" and serves is not None:
                    state = {"indexcache": {"fingerprint": "a" * 64, "pattern": serves}}
                    self.reply({"internal_states": [{}, state]})
                else:
                    self.reply({"data": [{"id": "stub"}]})

            def post(self, body: Any) -> None:
                stub.asked.append(body)
                choice: dict[str, Any] = {"text": says}
                if body.get("echo") and logprobs:
                    values = [None, *(-token / 100 / factor for token in body["prompt"][1:]), -1.0]
                    tops = [None, *({"x": value or 0.0} for value in values[1:])]
                    choice["logprobs"] = {"token_logprobs": values, "top_logprobs": tops}
                self.reply({"choices": [choice]})

        super().__init__(Handler)


@pytest.fixture
def stubs() -> Iterator[list[Stub]]:
    started: list[Stub] = []
    yield started
    for stub in started:
        stub.close()


def test_servers_are_compared(stubs: list[Stub], tmp_path: Path) -> None:
    stubs += [Stub(1.0, "whatever"), Stub(0.5, "whatever")]
    urls = [option for stub in stubs for option in ("--endpoint", stub.url)]
    data = ["--evaluation", "demo:copy", "--num-sequences", "3", "--tasks", "multi_value:samples=2"]
    result = run(*urls, *data, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "eval.json").read_text())
    first, second = found["held_out"]["rows"]
    assert second["name"] == stubs[1].url and second["kind"] == "named"
    assert (
        [row["pattern"] for row in (first, second)] == [None, None] == [row["full_layers"] for row in (first, second)]
    )
    for source in ("demo:copy", "multi_value-style"):
        loss = first["by_source"][source]["loss"]["mean"]
        assert second["by_source"][source]["loss"]["mean"] == pytest.approx(2 * loss) and math.isfinite(loss)
        assert first["by_source"][source]["accuracy"]["mean"] == 1.0
    assert first["by_source"]["multi_value-style"]["generated"]["mean"] == 0.0
    assert "generated" not in first["by_source"]["demo:copy"]
    questions = [body for body in stubs[1].asked if not body.get("echo")]
    assert len(questions) == 2 and all(body["temperature"] == 0 for body in questions)
    assert all(len(body["prompt"]) < 512 <= len(body["prompt"]) + body["max_tokens"] for body in questions)


@pytest.mark.parametrize(("serves", "counted"), [("FSFS+0q4+2q16", 128), ("FSFS", 1024)])
def test_of_servers_that_select_in_blocks_what_they_read_one_by_one_counts(
    serves: str, counted: int, stubs: list[Stub], tmp_path: Path
) -> None:
    """They read whole sequences as prompts, whose tokens see later ones but for the last 128."""
    stubs += [Stub(1.0, "whatever"), Stub(0.5, "whatever", serves=serves)]
    urls = [option for stub in stubs for option in ("--endpoint", stub.url)]
    data = ["--evaluation", "demo:text", "--num-sequences", "2", "--seq-len", "1024"]
    result = run(*urls, *data, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    said = "selects for blocks of queries: the last 128 tokens of a sequence count (--reply 128)"
    assert (said in " ".join(result.stderr.split())) == (counted == 128)
    found = json.loads((tmp_path / "eval.json").read_text())["held_out"]["rows"]
    tokens = [row["by_source"]["demo:text"]["loss"]["mean"] for row in found]
    sequences = [body["prompt"] for body in stubs[1].asked if "prompt" in body]
    assert len(sequences) == 2
    first = max(1024 - counted, 64) + 1  # index_topk of the demo
    means = [sum(sequence[first:]) / 100 / len(sequence[first:]) for sequence in sequences]
    assert tokens == [pytest.approx(sum(means) / 2), pytest.approx(sum(means))]


def test_more_of_a_server_that_selects_in_blocks_can_not_count(stubs: list[Stub], tmp_path: Path) -> None:
    stubs += [Stub(1.0, "", serves="FSFS+2q2"), Stub(1.0, "")]
    urls = [option for stub in stubs for option in ("--endpoint", stub.url)]
    data = ["--evaluation", "demo:text", "--num-sequences", "2", "--seq-len", "512"]
    result = run(*urls, *data, "--reply", "129", "--output", str(tmp_path))
    assert result.exit_code == 2 and not stubs[1].asked, result.output
    said = " ".join(result.stderr.split())
    assert (
        "--reply is 129" in said and f"{stubs[0].url} selects for blocks of queries" in said and "at most 128" in said
    )
    assert run(*urls, *data, "--reply", "100", "--output", str(tmp_path)).exit_code == 0
    plain = ["--endpoint", stubs[1].url] * 2
    result = run(*plain, *data, "--reply", "513", "--output", str(tmp_path))
    assert result.exit_code == 2 and "--reply is 513, expected fewer than the 512 tokens" in " ".join(
        result.stderr.split()
    )
    stubs += [Stub(1.0, "", serves="FSFS+2z9")]  # a later version's
    result = run(*urls, "--endpoint", stubs[2].url, *data, "--output", str(tmp_path))
    assert result.exit_code == 2 and stubs[2].url in result.stderr


def test_a_server_that_says_the_right_thing_scores(stubs: list[Stub], tmp_path: Path, tokenizer: Any) -> None:
    tasks = ["--tasks", "multi_key:samples=2,haystack=demo:text"]
    data = ["--evaluation", "demo:copy", "--num-sequences", "1", *tasks]
    stubs += [Stub(1.0, "nothing")]
    urls = ["--endpoint", stubs[0].url]
    assert run(*urls, *urls, *data, "--output", str(tmp_path)).exit_code == 0
    prompts = [tokenizer.decode(body["prompt"]) for body in stubs[0].asked if not body.get("echo")]
    keys = [prompt.split("What is the code of ")[1].split("?")[0] for prompt in prompts]
    values = [
        prompt.split(f"the code of {key} is ")[1].split(".")[0] for prompt, key in zip(prompts, keys, strict=True)
    ]
    stubs += [Stub(1.0, f"It is {values[0]}.")]
    urls = ["--endpoint", stubs[0].url, "--endpoint", stubs[1].url]
    result = run(*urls, *data, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    row = json.loads((tmp_path / "eval.json").read_text())["held_out"]["rows"][1]["by_source"]["multi_key-style"]
    assert row["generated"]["mean"] == 0.5 == row["generated_change"]["mean"]


def test_a_server_without_logprobs_is_refused(stubs: list[Stub], tmp_path: Path) -> None:
    stubs += [Stub(1.0, "", logprobs=False)]
    urls = ["--endpoint", stubs[0].url] * 2
    result = run(*urls, "--evaluation", "demo:copy", "--num-sequences", "1", "--output", str(tmp_path))
    assert result.exit_code == 2 and "gives no logprobs of a prompt" in result.stderr


def test_the_shipped_patterns_are_for_the_demo_model() -> None:
    model = describe_model(str(demo.MODEL))
    kept = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]
    lines = named_lines([(None, PatternSpec.read(path)) for path in demo.PATTERNS], kept, (), model)
    names = [(line.name, str(line.retention)) for line in lines]
    assert names == [(name, share) for name in ("lazy", "similarity") for share in ("1/2", "1/4", "1/8")]


# -- the gate


def test_a_uniform_pattern_passes_no_gate_by_its_name(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    for spec in ("uniform4=FSSSSS", "baseline-prod=FSSSSS"):
        more = ["--pattern", spec, "--no-uniform", "--max-increase", "-100"]
        assert run(*options(model_folder, token_file, tmp_path / "out"), *more).exit_code == 1
    for bad in ("nan", "inf", "-inf"):
        result = run(
            *options(model_folder, token_file, tmp_path / "out"), "--pattern", "a=FSSSSS", "--max-increase", bad
        )
        assert result.exit_code == 2 and "--max-increase" in result.stderr
