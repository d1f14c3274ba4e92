"""indexcache-watch against real servers whose own log of requests it reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from typer.testing import CliRunner

from indexcache_search import demo
from indexcache_search.hf.loading import load_tokenizer
from indexcache_watch.cli import app
from indexcache_watch.requests import Request
from indexcache_watch.scores import loss
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.servers import reads_in_blocks
from tests.live.server import Server, running

pytestmark = pytest.mark.sglang
PLAIN = (sys.executable, "-m", "sglang.launch_server")
PATTERN, LOOKUP = "FSSFSSFSFSSSSSSS", 8  # without layer 8 nothing is found any more
BROKEN = PATTERN[:LOOKUP] + "S" + PATTERN[LOOKUP + 1 :]
LOGGED = ("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json", "--log-requests-target")
CORES = [{"SGLANG_CPU_OMP_THREADS_BIND": core} for core in "01"]


def texts(count: int) -> list[list[int]]:
    """Prompts of running text."""
    tokenizer = load_tokenizer(str(demo.MODEL))
    rows = demo.data_file("text").read_text().splitlines()
    ids = [tokenizer.encode(json.loads(row)["text"], add_special_tokens=False) for row in rows]
    pieces = [row[start : start + 400] for row in ids for start in range(0, len(row) - 400, 400)]
    return pieces[:count]


def lookups(count: int) -> list[list[int]]:
    """Prompts that ask for what stands in them."""
    rows = [
        json.loads(row)
        for name in ("multi", "update", "chain")
        for row in demo.data_file(name).read_text().splitlines()
    ]
    return [row["input_ids"][: row["loss_mask"].index(1)] for row in rows][:count]


def ask(server: Server, prompts: list[list[int]], **sampling: Any) -> None:
    """Send what clients send; the server logs it with its replies."""
    for start in range(0, len(prompts), 8):
        server.post(
            "/generate",
            input_ids=prompts[start : start + 8],
            sampling_params={"max_new_tokens": 12, "ignore_eos": True, **sampling},
        )


def watch(served: Server, reference: Server, log: Path, output: Path) -> Any:
    options = ["--served", served.url, "--reference", reference.url, "--requests", str(log), "--output", str(output)]
    return CliRunner().invoke(app, [*options, "--rate", "100", "--buckets", "64,256,512"])


def test_a_watch_tells_a_pattern_that_finds_nothing_from_one_that_does(tmp_path: Path) -> None:
    """Clients ask for texts, then for lookups: traffic changes, and the good pattern bears it."""
    traffic = {"good": texts(20) + lookups(20), "broken": lookups(36)}
    patterns = {"good": PATTERN, "broken": BROKEN}
    results, changes = {}, {}
    with running(demo.MODEL, tmp_path / "reference", launcher=PLAIN, **CORES[0]) as reference:
        for name, pattern in patterns.items():
            file = write_pattern(Pattern(pattern), demo.MODEL, tmp_path / f"{name}.yaml")
            flags = ("--indexcache-pattern", str(file), *LOGGED, str(tmp_path / "logs" / name))
            with running(demo.MODEL, tmp_path / name, *flags, **CORES[1]) as served:
                ask(served, traffic[name], temperature=1.0, top_p=0.95, top_k=40)
                results[name] = watch(served, reference, tmp_path / "logs" / name, tmp_path / f"out-{name}")
        same = watch(reference, reference, tmp_path / "logs" / "good", tmp_path / "out-same")
    for name in patterns:
        rows = [json.loads(line) for line in (tmp_path / f"out-{name}" / "watch.jsonl").read_text().splitlines()[1:]]
        changes[name] = [(row["served"] - row["reference"]) / row["tokens"] for row in rows]
        print(name, results[name].stdout, results[name].stderr)
    assert results["good"].exit_code == 0, results["good"].output
    assert len(changes["good"]) >= 40  # each request of a client; none that the watch itself sent
    assert results["broken"].exit_code == 1, results["broken"].output
    [line] = [line for line in results["broken"].stderr.splitlines() if "loss changes by" in line]
    assert "requests of 257-512 tokens: loss changes by -" in line  # likelier to the server that wrote it
    assert len(changes["broken"]) <= 36 and min(changes["broken"]) < -1.0
    assert same.exit_code == 2 and "are the same server" in same.stderr


def test_in_blocks_a_reply_is_scored_as_it_was_written(tmp_path: Path) -> None:
    """In pieces, as the watch reads it, its tokens have the logprobs that they were written with; at once, others."""
    pattern = Pattern.parse("F" * 16 + "".join(f"+{layer}q16" for layer in range(16)))
    file = write_pattern(pattern, demo.MODEL, tmp_path / "blocks.yaml")
    prompt, written = lookups(1)[0], 200
    with running(demo.MODEL, tmp_path / "log", "--indexcache-pattern", str(file)) as server:
        sampling = {"max_new_tokens": written, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 1}
        answer = server.post(
            "/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=-1
        )
        assert reads_in_blocks(server.url)
        tokens = np.array([*prompt, *answer["output_ids"]])
        request = Request("here", tokens, np.arange(len(tokens)) >= len(prompt))
        whole, pieces = (loss(Address.of(server.url), request, in_blocks) for in_blocks in (False, True))
    while_written = -sum(entry[0] for entry in answer["meta_info"]["output_token_logprobs"])
    print(f"written {while_written:.4f}, in pieces {pieces:.4f}, at once {whole:.4f}")
    assert pieces == pytest.approx(while_written, abs=0.01) and abs(whole - while_written) > 1
