"""indexcache-eval --harness: scores paired by document, lm-eval in a process. tests/live runs the real one."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from indexcache_harness import lm_eval
from indexcache_harness.lm_eval import configuration
from indexcache_harness.samples import Score, lower_is_better, paired, read_samples
from indexcache_harness.settings import Harness
from indexcache_search.cli.evaluate import app
from indexcache_search.errors import DataError
from indexcache_search.eval.endpoints import Endpoint
from sglang_indexcache.http.address import Address
from sglang_indexcache.version import requirement
from tests.http_stub import Answering, HttpStub
from tests.search.streaming import StreamingStub
from tests.search.test_fuzz import mutated, one_line_or

# -- files of lm-eval


def line(document: int, score: float = 1.0, **more: Any) -> dict[str, Any]:
    digests = {"doc_hash": f"d{document}", "prompt_hash": f"p{document}", "target_hash": "t"}
    return {"doc_id": document, "filter": "none", "metrics": ["acc"], "acc": score, "doc": {}, **digests, **more}


def write(folder: Path, *lines: dict[str, Any], task: str = "mmlu_a_b") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"samples_{task}_2026-11-28T07-40-48.123456.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in lines))
    return path


def test_a_tasks_metrics_and_filters_are_read(tmp_path: Path) -> None:
    write(
        tmp_path / "model",
        line(1, 0.0),
        line(0, metrics=["acc", "perplexity"], perplexity=[1, 2]),
        line(0, filter="strict", metrics=["acc", "f1"], f1=0.5),
    )
    write(tmp_path / "model", line(0, True), task="other")
    found = read_samples(tmp_path)
    assert set(found) == {
        Score("mmlu_a_b", "acc", "none"),
        Score("mmlu_a_b", "acc", "strict"),
        Score("mmlu_a_b", "f1", "strict"),
        Score("other", "acc", "none"),
    }
    [(score, before, after)] = paired(
        {Score("a", "b", "c"): {(1, "", ""): 0.0, (0, "", ""): 1.0}},
        {Score("a", "b", "c"): {(0, "", ""): 0.5, (1, "", ""): 0.25}},
        "",
    )
    assert (before, after) == ([1.0, 0.0], [0.5, 0.25]) and str(score) == "a b (c)"


def test_documents_of_other_lengths_have_no_score_in_ruler(tmp_path: Path) -> None:
    lengths = ["4096", "8192"]
    write(tmp_path, *(line(number, metrics=lengths, **{"4096": 0.5, "8192": -1.0}) for number in range(3)))
    assert list(read_samples(tmp_path)) == [Score("mmlu_a_b", "4096", "none")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(0), line(0)], "line 2: document 0 stands there twice"),
        ([line("0")], "doc_id: Input should be a valid integer"),  # type: ignore[arg-type]
        ([line(-1)], "doc_id: Input should be greater than or equal to 0"),
        ([{"doc_id": 1}], "metrics: Field required"),
        ([line(0, float("nan"))], "lm-eval left no scores of documents"),
        ([], "lm-eval left no scores of documents"),
    ],
    ids=["twice", "text", "negative", "incomplete", "nan", "empty"],
)
def test_files_that_can_not_be_get_one_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    write(tmp_path, *lines)
    with pytest.raises(DataError, match=message):
        read_samples(tmp_path)


def test_servers_that_answered_other_documents_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path / "a", line(0), line(1))
    for number, lines in enumerate(([line(0)], [line(0), line(1, prompt_hash="other")])):
        write(tmp_path / f"b{number}", *lines)
        with pytest.raises(DataError, match=r"http://b: mmlu_a_b acc: answered . documents, the baseline 2"):
            list(paired(read_samples(tmp_path / "a"), read_samples(tmp_path / f"b{number}"), "http://b"))


def test_a_thousand_mutated_outputs(tmp_path: Path) -> None:
    rng, accepted = random.Random(12), 0
    text = "".join(json.dumps(line(number, number % 2)) + "\n" for number in range(4))
    path = write(tmp_path)
    results = tmp_path / "results_2026-11-28T07-40-48.123456.json"
    said = json.dumps({"higher_is_better": {"mmlu_a_b": {"acc": True, "perplexity": False}}})
    for _ in range(1_000):
        path.write_bytes(mutated(text, rng).encode("utf-8", "surrogatepass"))
        results.write_bytes(mutated(said, rng).encode("utf-8", "surrogatepass"))
        samples = one_line_or(lambda: read_samples(tmp_path))
        one_line_or(lambda: lower_is_better(tmp_path))
        accepted += samples is not None
        for scores in (samples or {}).values():
            assert scores and all(np.isfinite(value) for value in scores.values())
    assert 0.01 < accepted / 1_000 < 0.95


# -- a whole run, with something in lm-eval's place

LM_EVAL = """
import json, os, pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
print("asks", config["model_args"]["base_url"], "with", os.environ.get("OPENAI_API_KEY"))
pathlib.Path({seen!r}).open("a").write(json.dumps(config) + "\\n")
if config["tasks"] == ["nothing"]:
    raise ValueError("Tasks not found: nothing")
folder = pathlib.Path(config["output_path"]) / "stub"
folder.mkdir(parents=True)
served = config["model_args"]["base_url"].startswith({worse!r})
for task in config["tasks"]:
    with (folder / f"samples_{{task}}_2026-11-28T07-40-48.1.jsonl").open("w") as file:
        for number in range(40):
            score = float(not served or number % 2)
            line = {{"doc_id": number, "filter": "none", "metrics": ["acc", "loss"], "acc": score, "loss": 1 - score}}
            file.write(json.dumps({{**line, "doc_hash": str(number), "prompt_hash": ""}}) + "\\n")
said = {{task: {{"acc": True, "loss": False}} for task in config["tasks"]}}
(folder / "results_2026-11-28T07-40-48.1.json").write_text(json.dumps({{"higher_is_better": said}}))
"""


class Handler(Answering):
    def get(self) -> None:
        content = {"/v1/models": {"data": [{"id": "glm"}]}, "/server_info": {"max_req_input_len": 4000}}
        self.reply(content[self.path])


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """A baseline and a worse server."""
    servers = [HttpStub(Handler) for _ in range(2)]
    yield [server.url for server in servers]
    for server in servers:
        server.close()


@pytest.fixture
def seen(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """lm-eval's stand-in; what it was asked to do, a line for each run."""
    package = tmp_path / "site" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(LM_EVAL.format(seen=str(tmp_path / "seen"), worse=urls[1]))
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setattr(lm_eval, "version", lambda: "0.4.9")
    return tmp_path / "seen"


def run(urls: list[str], tmp_path: Path, settings: str, *more: str) -> Any:
    words = [word for url in urls for word in ("--endpoint", url)]
    line = [*words, "--harness", settings, "--output", str(tmp_path / "out"), *more]
    return CliRunner().invoke(app, line, env={"COLUMNS": "200"})


def test_servers_are_compared_on_tasks(
    urls: list[str], seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "secret-of-mine")
    done = run([urls[0], f"{urls[1]}/v1"], tmp_path, "a/b:sampling=paper,limit=40")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out" / "harness.json").read_text())
    assert found["schema"] == "indexcache-eval/harness/v1" and found["harness"]["sampling"] == "paper"
    assert [(row["task"], row["metric"], row["higher_is_better"]) for row in found["rows"]] == [
        ("a", "acc", True),
        ("a", "loss", False),
        ("b", "acc", True),
        ("b", "loss", False),
    ]
    change = found["rows"][0]["change"]
    assert (change["baseline"], change["score"], change["fell"], change["rose"]) == (1.0, 0.5, 20, 0)
    assert change["low"] < -0.5 < change["high"] < 0 and f"{change['low']:+.3f} to {change['high']:+.3f}" in done.stdout
    assert found["rows"][0]["scores"][:2] == [[1.0, 0.0], [1.0, 1.0]]
    config = json.loads(seen.read_text().splitlines()[1])
    assert config["gen_kwargs"] == {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 40}
    assert config["model_args"]["base_url"] == f"{urls[1]}/v1/completions" and config["limit"] == 40
    log = (tmp_path / "out" / "lm-eval.log").read_text()
    assert log.count("asks") == 2 and "secret-of-mine" not in log and "None" not in log


def test_a_key_of_another_server_is_not_sent(
    urls: list[str], seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    assert run(urls, tmp_path, "a").exit_code == 0
    assert (tmp_path / "out" / "lm-eval.log").read_text().count("with None") == 2


@pytest.mark.parametrize(("most", "code"), [(0.1, 1), (0.6, 0)])
def test_a_fall_beyond_what_is_allowed_ends_with_1(
    urls: list[str], seen: Path, tmp_path: Path, most: float, code: int
) -> None:
    done = run(urls, tmp_path, f"a:max_fall={most}")
    lines = [line for line in done.stderr.splitlines() if line.startswith("--harness")]
    assert done.exit_code == code == bool(lines), done.output
    assert [f"max_fall={most:g}: {urls[1]}: a acc: worse by 0.500 (p " in line for line in lines[:1]] == [True] * code
    rows = json.loads((tmp_path / "out" / "harness.json").read_text())["rows"]
    assert all((row["p_fall"] <= 0.05) == bool(code) for row in rows) and "p of a fall" in done.stdout
    assert run([urls[0], urls[0]], tmp_path, "a:max_fall=0").exit_code == 0


def test_a_gate_that_no_fall_could_close_does_not_pass(
    urls: list[str], seen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexcache_harness.run.fewest_documents", lambda scores: 41)
    done = run([urls[0], urls[0]], tmp_path, "a:max_fall=0.01")
    assert done.exit_code == 1
    said = "a acc: not settled: of 40 documents no fall would show among 2 scores; expected at least 41"
    assert said in done.stderr
    assert run([urls[0], urls[0]], tmp_path, "a").exit_code == 0


def test_one_run_file_has_held_out_data_speed_and_tasks(seen: Path, tmp_path: Path) -> None:
    stubs = [StreamingStub(), StreamingStub()]
    section = {
        "endpoint": [stub.url for stub in stubs],
        "evaluation": ["demo:copy"],
        "num_sequences": 2,
        "speed": [256],
        "harness": "a",
        "output": str(tmp_path / "out"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"seq_len": 256, "eval": section}))
    for more, code in (([], 0), (["--max-increase", "-1"], 1)):
        done = CliRunner().invoke(app, ["--config", str(tmp_path / "run.yaml"), *more], env={"COLUMNS": "200"})
        assert done.exit_code == code, done.output
        compared = json.loads((tmp_path / "out" / "eval.json").read_text())
        assert len(compared["held_out"]["rows"]) == 2 and compared["speed"]
        assert [row["task"] for row in json.loads((tmp_path / "out" / "harness.json").read_text())["rows"]] == [
            "a",
            "a",
        ]
    for stub in stubs:
        stub.close()
    assert len(seen.read_text().splitlines()) == 4
    written = (tmp_path / "out" / "eval.json").read_bytes()
    done = CliRunner().invoke(app, ["--config", str(tmp_path / "run.yaml"), "--max-increase", "1", "--dry-run"])
    assert done.exit_code == 0 and "evaluation" in done.output, done.output  # of servers that are not there
    assert (tmp_path / "out" / "eval.json").read_bytes() == written


def test_prompts_are_token_ids_and_lengths_are_rulers(urls: list[str], tmp_path: Path) -> None:
    harness = Harness(tasks=("niah_single_1",), lengths=(4096, 8192), output_tokens=64, fewshot=0, include=tmp_path)
    found = configuration(harness, "owner/name@abc", Endpoint(Address.of(urls[0])), 4000, tmp_path)
    given = found["model_args"]
    assert (given["model"], given["tokenizer"], given["revision"]) == ("glm", "owner/name", "abc")
    assert given["tokenized_requests"] and given["max_length"] == 4000
    assert found["metadata"] == {"tokenizer": "owner/name", "max_seq_lengths": [4096, 8192]}
    assert found["gen_kwargs"] == {"do_sample": False, "temperature": 0, "max_gen_toks": 64}
    assert (found["num_fewshot"], found["include_path"]) == (0, str(tmp_path)) and "limit" not in found


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ("nothing", [], "lm-eval ended with exit code 1: ValueError: Tasks not found: nothing (all of it: "),
        ("a", ["--seq-len", "512"], "--seq-len needs --evaluation or --tasks beside --harness"),
        ("a", ["--max-increase", "1"], "--max-increase needs --evaluation or --tasks beside --harness"),
        ("a:sampling=wild", [], "sampling: found 'wild', expected one of greedy, paper"),
        ("a/a", [], "tasks are a, a, expected names, each once"),
    ],
)
def test_mistakes_get_one_line(
    urls: list[str], seen: Path, tmp_path: Path, settings: str, more: list[str], message: str
) -> None:
    done = run(urls, tmp_path, settings, *more)
    assert done.exit_code == 2 and message in done.stderr, done.output
    said = [text for text in done.stderr.splitlines() if not text.startswith("lm-eval asks")]
    assert len(said) == 1 and not (tmp_path / "out" / "harness.json").exists()


def test_servers_that_can_not_be_compared_are_refused(urls: list[str], seen: Path, tmp_path: Path) -> None:
    for given, message in (
        (urls[:1], "--endpoint: found 1, expected a baseline server"),
        ([*urls, urls[1]], "stands there twice"),
        ([urls[0], urls[1].replace("//", "//user:a-password@")], "has a user or a query, which lm-eval can't send"),
    ):
        done = run(given, tmp_path, "a")
        assert done.exit_code == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    done = CliRunner().invoke(app, ["--harness", "a", "--pattern", "FSFSFS"])
    assert done.exit_code == 2 and "--harness needs --endpoint" in done.stderr


def test_without_lm_eval_it_is_one_line(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval, "find_spec", lambda name: None)
    done = run(urls, tmp_path, "a")
    line = f"indexcache-eval: --harness: lm_eval is not installed; expected: pip install {requirement('harness')}\n"
    assert (done.exit_code, done.stderr) == (2, line)
