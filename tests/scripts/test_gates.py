"""The gates on servers of this CPU: what clients ask, which lookups lm-eval gets, and what has spoken already."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from indexcache_search.hf.loading import load_tokenizer
from scripts.bench.serving import gates
from tests.conftest import tiny_config
from tests.live.server import Server
from tests.scripts.small_corpus import VOCAB, write_corpus

LENGTH = 128


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    """Two rows of text and code each; three lookups, of which one has a long answer and one is no text's tokens."""
    write_corpus(tmp_path)
    config = tiny_config(layers=3, vocab_size=VOCAB, index_topk=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    plain = tokenizer.encode("the code of the third note about them is what they say. " * 20, add_special_tokens=False)
    lookups = []
    letters = [number for letter in "the code " * 20 for number in tokenizer.encode(letter, add_special_tokens=False)]
    for answer, ids in ((2, plain), (20, plain), (2, letters)):
        mask = [0] * (LENGTH - 30) + [1] * answer + [0] * (30 - answer)
        lookups.append({"input_ids": ids[:LENGTH], "loss_mask": mask})
    rows: dict[str, list[Any]] = {
        name: [{"input_ids": [number] * LENGTH} for number in (1, 2)] for name in ("text", "code")
    }
    rows["recall"] = lookups
    for name, written in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in written)
        (tmp_path / f"held-out-{name}-{LENGTH}.jsonl").write_text(lines)
    words = ["--model", str(tmp_path), "--data", str(tmp_path), "--length", str(LENGTH), "--requests", "2"]
    made = gates.parser().parse_args([*words, "--pattern", "good=FFS", "--output", str(tmp_path / "out")])
    made.output.mkdir()
    return made


def test_clients_ask_for_each_source_in_turns(options: argparse.Namespace) -> None:
    prompts = gates.traffic(options)
    assert len(prompts) == 6 and prompts[0] == prompts[1] == [1] * (LENGTH - gates.TOKENS)
    assert len(prompts[2]) == LENGTH - 30, "up to the answer"


def test_lm_eval_gets_lookups_whose_answers_are_short_and_whose_text_is_the_same(options: argparse.Namespace) -> None:
    with pytest.raises(SystemExit, match="1 lookups with short answers are the same as text, expected 2"):
        gates.write_task(options)
    options.requests = 1
    gates.write_task(options)
    [row] = map(json.loads, (options.output / "tasks" / "lookups.jsonl").read_text().splitlines())
    assert row["tokens"] == 2 and row["prompt"].startswith("the code of the third note")
    task = yaml.safe_load((options.output / "tasks" / "lookup.yaml").read_text())
    assert task["generation_kwargs"]["max_gen_toks"] == 2


def test_a_gate_that_has_spoken_is_not_asked_again(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options.requests = 1
    server, asked = Server("http://127.0.0.1:1", tmp_path / "log"), list[str]()
    monkeypatch.setattr(gates, "running", lambda *words, **more: nullcontext(server))
    monkeypatch.setattr(gates, "ask", lambda server, prompts: asked.append("clients"))

    def ran(command: list[str], **more: Any) -> Any:
        asked.append("watch" if "indexcache_watch" in command else "harness" if "--harness" in command else "eval")
        if asked[-1] == "harness" and asked.count("harness") == 1:
            raise KeyboardInterrupt
        return argparse.Namespace(returncode=1, stdout="\nworse\n", stderr="")

    monkeypatch.setattr(gates.subprocess, "run", ran)
    with pytest.raises(KeyboardInterrupt):
        gates.main(options)
    gates.main(options)
    gates.main(options)
    assert asked == ["clients", "watch", "eval", "harness", "harness"]
    found = json.loads((options.output / "gates.json").read_text())
    assert found == {"good": {gate: {"exit_code": 1, "said": ["worse"]} for gate in ("watch", "eval", "harness")}}
