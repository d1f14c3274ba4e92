"""lm-eval, as indexcache-eval --harness runs it, against real servers."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("sglang")
pytest.importorskip("lm_eval")

from typer.testing import CliRunner

from indexcache_search import demo
from indexcache_search.cli.evaluate import app
from indexcache_search.hf.loading import load_tokenizer
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from tests.live.server import running

pytestmark = pytest.mark.sglang
PLAIN = (sys.executable, "-m", "sglang.launch_server")
BROKEN = "FSSFSSFSSSSSSSSS"  # without layer 8 of the searched pattern: nothing is found any more
DOCUMENTS = 12


def write_tasks(folder: Path) -> None:
    """Two tasks of the demo's lookups: `lookup` writes the answer, `choice` takes one of two."""
    folder.mkdir()
    tokenizer, rng = load_tokenizer(str(demo.MODEL)), random.Random(0)
    rows = []
    for line in demo.data_file("update").read_text().splitlines():
        content = json.loads(line)
        tokens, first = content["input_ids"], content["loss_mask"].index(1)
        last = content["loss_mask"].index(0, first)
        prompt = tokenizer.decode(tokens[:first])
        if tokenizer.encode(prompt, add_special_tokens=False) == tokens[:first]:
            rows.append({"prompt": prompt, "answer": tokenizer.decode(tokens[first:last]), "tokens": last - first})
    for row in rows:
        wrong = rng.choice([other["answer"] for other in rows if other["answer"] != row["answer"]])
        row["choices"] = [row["answer"], wrong]
    data = folder / "lookups.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows[:DOCUMENTS]))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
    }
    generated = {"max_gen_toks": rows[0]["tokens"], "until": ["\n\n"]}
    lookup = {
        "task": "lookup",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": generated,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_target": 0,
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (lookup, choice):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task}))


def test_lm_eval_finds_all_f_equal_and_a_broken_pattern_worse(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    every = write_pattern(Pattern("F" * len(BROKEN)), demo.MODEL, tmp_path / "every.yaml")
    broken = write_pattern(Pattern(BROKEN), demo.MODEL, tmp_path / "broken.yaml")
    cores = [{"SGLANG_CPU_OMP_THREADS_BIND": core} for core in "010"]
    with (
        running(demo.MODEL, tmp_path / "log-a", launcher=PLAIN, **cores[0]) as plain,
        running(demo.MODEL, tmp_path / "log-b", "--indexcache-pattern", str(every), **cores[1]) as same,
        running(demo.MODEL, tmp_path / "log-c", "--indexcache-pattern", str(broken), **cores[2]) as worse,
    ):
        urls = [word for server in (plain, same, worse) for word in ("--endpoint", server.url)]
        settings = f"lookup/choice:include={tmp_path / 'tasks'},concurrency=2,max_fall=0.1"
        line = [*urls, "--harness", settings, "--output", str(tmp_path / "out")]
        done = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    print(done.output)
    assert done.exit_code == 1, done.output + (tmp_path / "out" / "lm-eval.log").read_text()[-3000:]
    found = json.loads((tmp_path / "out" / "harness.json").read_text())
    rows: dict[tuple[str, str], Any] = {(row["server"], row["task"]): row for row in found["rows"]}
    assert set(rows) == {(server.url, task) for server in (same, worse) for task in ("lookup", "choice")}
    for task in ("lookup", "choice"):
        change = rows[same.url, task]["change"]
        assert (change["change"], change["p_value"]) == (0.0, 1.0) and change["low"] == -change["high"] > -0.2
        assert change["documents"] == DOCUMENTS and change["baseline"] > 0.8
    change = rows[worse.url, "lookup"]["change"]
    assert change["high"] < -0.1 and change["p_value"] < 0.05 and change["fell"] > 5
    assert f"{change['low']:+.3f} to {change['high']:+.3f}" in done.stdout
