"""What command lines say of data: --dry-run and --rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from indexcache_lab.offload import cli as offload_cli
from indexcache_search import demo
from indexcache_search.cli import evaluate, search
from indexcache_search.data import dry_run
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_train import cli as distill

SOURCE_OF = {search.app: "--calibration", distill.app: "--training", evaluate.app: "--evaluation"}
NAMES = {"--calibration": "search", "--training": "distill", "--evaluation": "eval"}
BAD = 20
TALK = [{"role": "user", "content": "How?\tSo?"}, {"role": "assistant", "content": "So\x1b it is.\n" + "Thus. " * 400}]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without models: whatever would be loaded fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    rows = [
        json.dumps({"messages": [TALK[0], {**TALK[1], "content": TALK[1]["content"].replace("Thus", word)}], "id": n})
        for n, word in enumerate(("Thus", "Hence", "Then"), 1)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join([*rows, *["{"] * BAD]))


def run(app: typer.Typer, *more: str) -> Result:
    source = SOURCE_OF[app]
    sizes = {
        "--calibration": ("--num-sequences", "2", "--num-eval-sequences", "2"),
        "--training": ("--num-sequences", "2", "--num-eval-sequences", "2", "--seq-len", "512"),
        "--evaluation": ("--num-sequences", "2"),
    }[source]
    return CliRunner().invoke(app, ["--dry-run", source, "chat.jsonl", *sizes, *more])


@pytest.mark.parametrize("app", SOURCE_OF, ids=lambda app: NAMES[SOURCE_OF[app]])
def test_dry_runs_say_what_is_read_and_end(app: typer.Typer, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    result = run(app, "--rows", f"chat_template=chat.jinja,skip_bad={BAD}")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert re.fullmatch(r"note: skipped chat.jsonl: line \d+: not JSON( and \d+ more)?", lines[0])
    assert any(line.startswith("evaluation: 2 sequences of 512 tokens, ") for line in lines)
    assert any("chat.jsonl: 2 sequences, " in line and ", bad ones skipped: " in line for line in lines)
    assert any(line.startswith("    rows: ") and line.endswith(" of messages; columns not read: id") for line in lines)
    [example] = [line for line in lines if line.startswith("    the first: <user>How?")]
    assert "How?\\tSo?" in example and "So\\u001b it is.\\n" in example and len(example) < 900
    assert lines[-1].startswith("Nothing was loaded and nothing written")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("app", SOURCE_OF, ids=lambda app: NAMES[SOURCE_OF[app]])
def test_data_that_can_not_be_used_end_with_2(app: typer.Typer) -> None:
    for more, message in (
        (("--rows", "chat_template=chat.jinja"), ": not JSON; --rows skip_bad=N skips"),
        (("--rows", f"skip_bad={BAD}"), "no chat template; expected --rows chat_template=FILE"),
        (("--rows", "chat_template=none.jinja"), "none.jinja: No such file"),
    ):
        result = run(app, *more)
        assert result.exit_code == 2 and message in result.output and "Traceback" not in result.output, result.output


def test_counting_reads_rows_likewise() -> None:
    words = ["--model", str(demo.MODEL), "--evaluation", "chat.jsonl", "--seq-len", "512", "--rows", f"skip_bad={BAD}"]
    result = CliRunner().invoke(offload_cli.app, words)
    assert result.exit_code == 2 and "no chat template; expected --rows chat_template=FILE" in result.output


def test_what_counts_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of chats what the assistant wrote; token ids as the tokenizer reads them."""
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    tokenizer.chat_template = (tmp_path / "chat.jinja").read_text()
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": tokenizer.encode("So it is.")}))
    (tmp_path / "short.jsonl").write_text(json.dumps({"messages": [TALK[0], {"role": "assistant", "content": "So."}]}))
    reader = TokenReader(lambda: tokenizer, tokenizer.vocab_size, 64, replies=True)
    for source in ("short.jsonl", "ids.jsonl"):
        assert list(reader.documents(source, 0, "evaluation"))
    flags = np.zeros((2, 8), np.bool_)
    tokens = TokenSet(np.zeros((2, 8), np.int32), flags, np.arange(2), ("short.jsonl", "ids.jsonl"), flags)
    dry_run.show(reader, {"evaluation": tokens})
    lines = capsys.readouterr().out.splitlines()
    assert "    the first ([[what counts]]): <user>How?\\tSo?[[<assistant>So.]]" in lines
    assert "    the first: So it is." in lines
