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
from scripts.bench.serving.http_servers import Server
from tests.conftest import tiny_config
from tests.scripts.small_corpus import VOCAB, write_corpus

LENGTH = 128
SOURCES = ("text", "code")


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    """Two rows of text and code each; of four lookups the first two end in a short answer and are the same as text."""
    write_corpus(tmp_path)
    config = tiny_config(layers=3, vocab_size=VOCAB, index_topk=16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(str(tmp_path))
    plain = tokenizer.encode("the code of the third note about them is what they say. " * 20, add_special_tokens=False)
    letters = [number for letter in "the code " * 20 for number in tokenizer.encode(letter, add_special_tokens=False)]
    masks = [[0] * LENGTH for _ in range(4)]
    masks[0][5:7] = masks[0][-20:-18] = [1, 1]  # the last answer counts
    masks[1][-2:] = [1, 1]
    masks[2][-20:] = [1] * 20
    masks[3][-9:-7] = [1, 1]
    rows: dict[str, list[Any]] = {name: [{"input_ids": [number] * LENGTH} for number in (1, 2)] for name in SOURCES}
    ids = [plain[:LENGTH], plain[:LENGTH], plain[:LENGTH], letters[:LENGTH]]
    rows["recall"] = [{"input_ids": row, "loss_mask": mask} for row, mask in zip(ids, masks, strict=True)]
    for name, written in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in written)
        (tmp_path / f"held-out-{name}-{LENGTH}.jsonl").write_text(lines)
    words = ["--model", str(tmp_path), "--data", str(tmp_path), "--length", str(LENGTH), "--requests", "2"]
    made = gates.parser().parse_args([*words, "--pattern", "good=FFS", "--output", str(tmp_path / "out")])
    made.output.mkdir()
    return made


def test_clients_ask_for_each_source_in_turns(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    options.requests = 1
    with pytest.raises(SystemExit, match="2 lookups end in a short answer and are the same as text, not 3"):
        gates.traffic(options)
    monkeypatch.setattr(gates, "LOOKED_UP", 2)
    assert [len(prompt) for prompt in gates.traffic(options)] == [120, 120, LENGTH - 20, LENGTH - 2]
    monkeypatch.setattr(gates, "LOOKED_UP", 1)
    options.requests = 2
    prompts = gates.traffic(options)
    assert len(prompts) == 6 and prompts[0] == prompts[1] == [1] * (LENGTH - gates.TOKENS)
    assert [len(prompts[at]) for at in (2, 5)] == [LENGTH - 20, LENGTH - 2], "up to the last answer"


def test_lookups_end_in_short_answers_and_are_the_same_as_text(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    options.requests = 3
    with pytest.raises(SystemExit, match="2 lookups end in a short answer and are the same as text, not 3"):
        gates.lookups(options)
    options.requests = 2
    monkeypatch.setattr(gates, "LOOKED_UP", 1)
    gates.write_task(options)
    rows = [*map(json.loads, (options.output / "tasks" / "lookups.jsonl").read_text().splitlines())]
    assert len(rows) == 2 and rows[0]["prompt"].startswith("the code of the third note")
    task = yaml.safe_load((options.output / "tasks" / "lookup.yaml").read_text())
    assert task["generation_kwargs"]["max_gen_toks"] == 2
    counted = [json.loads(line)["loss_mask"] for line in gates.held_out(options)[-1].read_text().splitlines()]
    assert [mask.index(1) for mask in counted] == [LENGTH - 20, LENGTH - 2], "what servers read query by query"
    early = {"input_ids": [0] * 300, "loss_mask": [*[0] * 171, 1, *[0] * 128]}
    late = {"input_ids": [0] * 300, "loss_mask": [*[0] * 173, 1, *[0] * 126]}
    assert gates.Lookup.of(early) is None and gates.Lookup.of(late) is not None


def test_a_gate_that_has_spoken_is_not_asked_again(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, asked = Server("stub", "http://127.0.0.1:1"), list[str]()
    monkeypatch.setattr(gates, "serving", lambda *words: nullcontext(server))
    monkeypatch.setattr(gates, "LOOKED_UP", 1)
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
