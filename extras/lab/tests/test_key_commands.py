"""indexcache-lab key-delta, on a random dense model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from indexcache_dense.selection import Selection
from indexcache_lab.cli import app
from indexcache_lab.key_delta.attention import chosen_blocks
from indexcache_lab.key_delta.compare import share_of, window_of
from indexcache_lab.key_delta.engine import KeyEngine, pairs_of
from indexcache_lab.key_delta.file import KeyFile
from indexcache_lab.key_delta.search import STEP, Curves, allocate
from indexcache_search.errors import SearchError
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from tests.conftest import LAYERS, PAGES, VOCAB


def evaluate(*options: object) -> Any:
    return CliRunner().invoke(app, ["key-delta", "eval", *map(str, options)])


def search(*options: object) -> Any:
    return CliRunner().invoke(app, ["key-delta", "search", *map(str, options)])


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows whose last 12 tokens are replies."""
    path = tmp_path_factory.mktemp("replies") / "replies.jsonl"
    rows = np.random.default_rng(3).integers(3, VOCAB, (24, 160)).tolist()
    lines = [json.dumps({"input_ids": row, "loss_mask": [0] * 148 + [1] * 12}) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = np.random.default_rng(4).integers(3, VOCAB, (40, 160)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def test_a_comparison_at_equal_savings(dense_folder: Path, texts: Path, replies: Path, tmp_path: Path) -> None:
    options = [
        "--model",
        dense_folder,
        "--threshold",
        "0.3,0.9",
        "--near",
        "window=0.1",
        "--evaluation",
        texts,
        "--evaluation",
        replies,
        "--seq-len",
        160,
        "--num-sequences",
        8,
        "--output",
        tmp_path / "out",
        "--pattern",
        f"delta=D{'S' * (LAYERS - 1)}",
        "--pattern",
        f"own={'F' * LAYERS}",
        "--selection",
        "pages=4,score=compressed_keys,page_tokens=32,recent_pages=2,sink_pages=0,steps=none/nosa:1",
    ]
    done = evaluate(*options)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "out" / "eval.json").read_text())
    rows = {row["name"]: row for row in result["held_out"]["rows"]}
    named = ["delta, none", "delta, nosa:1", "own, none", "own, nosa:1"]
    assert list(rows)[:7] == ["baseline", "differences above 0.3", "differences above 0.9", *named]
    assert {"keys of 8 bits", "keys of 4 bits"} < set(rows) and len(rows) == 13
    for name in named:
        assert rows[name]["kl"]["mean"] > 0 and rows[name]["extra"]["skips reading"]["mean"] > 0
        assert rows[name]["extra"]["skips decoding"]["mean"] > 0
    assert rows["own, none"]["extra"] == rows["own, nosa:1"]["extra"]
    assert rows["own, none"]["kl"]["mean"] != rows["own, nosa:1"]["kl"]["mean"]
    for row in rows.values():
        assert set(row["extra"]) == {"skips reading", "skips decoding"}
    few, many = (rows[f"differences above {value}"] for value in (0.3, 0.9))
    assert 0 < few["extra"]["skips reading"]["mean"] < many["extra"]["skips reading"]["mean"] < 1
    assert 0 < few["kl"]["mean"] < many["kl"]["mean"] and few["extra"]["skips decoding"]["mean"] > 0
    rivals = [row for name, row in rows.items() if "window" in name or "blocks" in name]
    for plan, own in zip((few, many), (rivals[:2], rivals[2:]), strict=True):
        for rival in own:
            assert rival["extra"]["skips reading"]["mean"] == pytest.approx(
                plan["extra"]["skips reading"]["mean"], abs=0.03
            )
    assert rows["keys of 4 bits"]["extra"] == rows["baseline"]["extra"]
    page = (tmp_path / "out" / "eval.html").read_text()
    assert "What is left out" in page and page.count("<svg") == 2
    assert "skips reading" in done.output and "differences above 0.9" in done.output


def test_a_pattern_file_is_compared_at_each_retention(dense_folder: Path, texts: Path, tmp_path: Path) -> None:
    """One that names none of its own, beside plans for keys, as without them."""
    file = write_pattern(Pattern("DSSDSS", PAGES), dense_folder, tmp_path / "a.yaml")
    options = ["--model", dense_folder, "--threshold", "0.5", "--no-rivals", "--evaluation", texts,
               "--seq-len", 160, "--num-sequences", 2, "--pattern", f"mine={file}", "--retain", "1/3",
               "--output", tmp_path / "out"]  # fmt: skip
    done = evaluate(*options)
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out" / "eval.json").read_text())["held_out"]["rows"]
    assert [row["name"] for row in rows] == ["baseline", "differences above 0.5", "mine"]
    assert rows[2]["retention"] == "1/3" and rows[2]["kl"]["mean"] > 0


@pytest.mark.usefixtures("no_pictures")
def test_a_comparison_goes_on_where_it_ended(
    dense_folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", dense_folder, "--threshold", "0.5", "--evaluation", texts, "--seq-len", 160,
               "--num-sequences", 4, "--output", tmp_path]  # fmt: skip
    assert evaluate(*options).exit_code == 0
    before = (tmp_path / "eval.json").read_bytes()
    monkeypatch.setattr(KeyEngine, "run_plan", lambda *_: pytest.fail("ran again"))
    assert evaluate(*options).exit_code == 0
    assert (tmp_path / "eval.json").read_bytes() == before


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_thresholds_are_found_and_compared(dense_folder: Path, texts: Path, replies: Path, tmp_path: Path) -> None:
    sizes = [
        "--seq-len",
        160,
        "--num-sequences",
        4,
        "--num-eval-sequences",
        4,
        "--near",
        "window=0.1",
        "--batch-size",
        4,
    ]
    options = ["--model", dense_folder, "--calibration", texts, "--evaluation", texts, "--evaluation", replies, *sizes]
    done = search(*options, "--skip", "0.3,0.5", "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    for asked in (0.3, 0.5):
        file = KeyFile.load(tmp_path / "out" / f"thresholds-{asked:g}.json")
        assert len(file.thresholds) == LAYERS and len(set(file.thresholds)) > 1
        assert file.measured == pytest.approx(asked, abs=0.03) and file.kl > 0
        assert f"{asked:g}: one threshold for all layers has" in done.output
    rows = json.loads((tmp_path / "out" / "eval.json").read_text())["held_out"]["rows"]
    named = {row["name"]: row["extra"]["skips reading"]["mean"] for row in rows}
    assert named["searched, 0.5"] == pytest.approx(named["one threshold, 0.5"], abs=0.02)

    again = search(
        *options, "--skip", "0.3,0.5", "--output", tmp_path / "again", "--work-dir", tmp_path / "out" / "work"
    )
    assert again.exit_code == 0, again.output
    names = ("thresholds-0.3.json", "thresholds-0.5.json", "eval.json")
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)

    compared = evaluate("--model", dense_folder, "--threshold", tmp_path / "out" / "thresholds-0.5.json",
                        "--no-rivals", "--evaluation", texts, "--seq-len", 160, "--num-sequences", 4,
                        "--output", tmp_path / "eval")  # fmt: skip
    assert compared.exit_code == 0, compared.output
    [_, row] = json.loads((tmp_path / "eval" / "eval.json").read_text())["held_out"]["rows"]
    assert row["name"].startswith("differences above ") and " to " in row["name"]


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_shared_out_at_the_least_price(seed: int) -> None:
    """Against every way to do it."""
    generator = np.random.default_rng(seed)
    steps = 6
    prices = np.sort(generator.random((4, steps)), axis=1)
    prices[:, 0] = 0.0
    prices[1, 4:] = np.inf
    share = 9 * STEP / 4
    ways = [way for way in np.ndindex(*(steps,) * 4) if sum(way) == 9]
    least = min(sum(prices[layer, step] for layer, step in enumerate(way)) for way in ways)
    shares = allocate(prices, share)
    assert shares is not None and sum(shares) == pytest.approx(9 * STEP)
    assert sum(prices[layer, round(item / STEP)] for layer, item in enumerate(shares)) == pytest.approx(least)
    assert allocate(prices, 19 * STEP / 4) is None and allocate(prices, 1.0) is None


def test_curves_are_read_backwards() -> None:
    curves = Curves(np.array([[0.0, 1.0, 2.0], [0.0, 2.0, 4.0]]), np.array([[0.0, 0.5, 0.8], [0.0, 0.5, 0.8]]))
    assert curves.threshold(0, 0.25) == 0.5 and curves.threshold(1, 0.65) == 3.0 and curves.threshold(0, 0.9) == 2.0
    value = curves.uniform(0.5)
    shares = [np.interp(value, curves.thresholds[layer], curves.skipped[layer]) for layer in range(2)]
    assert np.mean(shares) == pytest.approx(0.5)


def test_windows_and_blocks_that_leave_out_as_much() -> None:
    import torch

    counted = np.zeros((2, 90), bool)
    counted[0], counted[1, 40:] = True, True
    positions = np.nonzero(counted)[1]
    for skipped in (0.1, 0.4, 0.7):
        window = window_of(skipped, counted)
        left = [min(position + 1, window) + min(4, max(position + 1 - window, 0)) for position in positions]
        assert 1 - sum(left) / (positions + 1).sum() == pytest.approx(skipped, abs=0.02)
    key = torch.randn(1, 1, 90, 8)
    for skipped in (0.1, 0.3):
        share = share_of(skipped, counted)
        looks = chosen_blocks(torch.randn(1, 1, 90, 8), key, share)[0, 0].tril().numpy()
        assert 1 - looks[positions].sum() / (positions + 1).sum() == pytest.approx(skipped, abs=0.04)


def test_pairs_of_a_pattern_are_those_of_brute_force() -> None:
    read = np.arange(70) < 30
    pattern = Pattern("DSSDSS", PAGES)
    for stage, rows in (("reading", read), ("decoding", ~read)):
        computed = everything = 0
        for letter in pattern.roles:
            for position in np.flatnonzero(rows):
                live = position // PAGES.page_tokens + 1
                few = letter == "S" and stage == "decoding" and live > PAGES.pages
                own = position % PAGES.page_tokens + 1
                computed += (PAGES.pages - 1) * PAGES.page_tokens + own if few else position + 1
                everything += position + 1
        assert pairs_of(pattern, read, read, stage) == (computed, everything)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", ["token_max", "compressed_keys", "rounded_keys"])
def test_pairs_of_layers_that_choose_for_themselves(score: str) -> None:
    """Of a text, in which every token chooses: by all keys, by means of 32 of them, or by all, rounded."""
    selection = Selection(page_tokens=16, pages=3, recent_pages=1, sink_pages=0, score=score)  # type: ignore[arg-type]
    computed = everything = 0
    for position in range(100):
        for letter in "DFS":
            chosen = min(position + 1, 32 + position % 16 + 1)
            means = len([begin for begin in range(0, 100, 16) if begin + 32 <= position + 1])
            digests = means if score == "compressed_keys" else position + 1
            own = position + 1 if score == "token_max" else chosen + (digests if chosen <= position else 0)
            computed += {"D": position + 1, "F": own, "S": chosen}[letter]
            everything += position + 1
    read = np.ones(100, bool)
    assert pairs_of(Pattern("DFS", selection), read, None, "reading") == (computed, everything)
    assert pairs_of(Pattern("DFS", selection), read, ~read, "reading") == (computed, everything)
    assert pairs_of(Pattern("DFS", selection), read, read, "reading") == (everything, everything)


def test_what_cannot_be_done_is_one_line(dense_folder: Path, model_folder: Path, texts: Path, tmp_path: Path) -> None:
    dense = ["--model", dense_folder, "--evaluation", texts, "--seq-len", 160, "--output", tmp_path]
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": "indexcache-keys/v1"}')
    for options, words in (
        (["--evaluation", texts], "Missing option '--model'"),
        ([*dense, "--model", model_folder], "has indexers that choose"),
        ([*dense, "--threshold", "0.5,nothing"], "'nothing' is neither a number nor a file"),
        ([*dense, "--threshold", "-1"], "a value is -1.0"),
        ([*dense, "--threshold", "nan"], "a value is nan"),
        ([*dense, "--near", "window=2"], "expected 0 to 1"),
        ([*dense, "--threshold", broken], "model: Field required"),
    ):
        done = evaluate(*options)
        assert done.exit_code == 2 and words in done.stderr, done.output
        assert "Traceback" not in done.output
    calibrated = ["--model", dense_folder, "--calibration", texts, "--seq-len", 160, "--output", tmp_path / "s"]
    sizes = ["--num-sequences", 4, "--num-eval-sequences", 4]
    for options, words in (
        ([*calibrated, *sizes, "--skip", "1.5"], "expected shares between 0 and 1"),
        ([*calibrated, *sizes, "--skip", "0.99"], "expected at most 0."),
        ([*calibrated, *sizes, "--engine", "sglang"], "No such option: --engine"),
        ([*calibrated, *sizes, "--objective", "nll"], "No such option: --objective"),
        (["--calibration", texts], "Missing option '--model'"),
    ):
        done = search(*options)
        assert done.exit_code == 2 and words in done.stderr, done.output


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.usefixtures("no_pictures")
def test_a_file_of_another_model_is_refused(tmp_path: Path, dense_folder: Path, texts: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(texts.read_text().splitlines(keepends=True)[:12]))
    done = search("--model", dense_folder, "--calibration", few, "--seq-len", 160, "--num-sequences", 4,
                  "--num-eval-sequences", 4, "--skip", "0.3", "--output", tmp_path / "s")  # fmt: skip
    assert done.exit_code == 0, done.output
    path = tmp_path / "s" / "thresholds-0.3.json"
    content = json.loads(path.read_text())
    digest, content["model"]["config_sha256"] = content["model"]["config_sha256"], "0" * 64
    path.write_text(json.dumps(content))
    done = evaluate("--model", dense_folder, "--threshold", path, "--evaluation", few, "--seq-len", 160)
    assert done.exit_code == 2 and "the thresholds are of" in done.stderr
    done = evaluate("--model", dense_folder, "--threshold", 0.5, "--evaluation", few, "--seq-len", 160,
                    "--num-sequences", 12, "--no-rivals", "--output", tmp_path / "e")  # fmt: skip
    assert done.exit_code == 0 and "left out" not in done.stderr
    content["model"]["config_sha256"] = digest
    path.write_text(json.dumps(content))
    done = evaluate("--model", dense_folder, "--threshold", path, "--evaluation", few, "--seq-len", 160,
                    "--num-sequences", 8, "--no-rivals", "--output", tmp_path / "f")  # fmt: skip
    assert done.exit_code == 0 and "left out 4 documents that a plan was calibrated on" in done.stderr
    content["sketch"] = "nothing"
    path.write_text(json.dumps(content))
    with pytest.raises(SearchError, match="sketch can't be read"):
        KeyFile.load(path)
    content["thresholds"] = [-1.0]
    path.write_text(json.dumps(content))
    with pytest.raises(SearchError, match="a value is -1"):
        KeyFile.load(path)
