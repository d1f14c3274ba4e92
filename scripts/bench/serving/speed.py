"""The speed that indexcache-eval measures, beside that of SGLang's bench_serving, on the same servers.

    python -m scripts.bench.serving.speed --model GLM-5-rank --lengths 32768,131072 plain 'shared=FSSS*4'
    python -m scripts.bench.serving.speed --endpoint http://a:30000 --endpoint http://b:30000 --lengths 32768

A condition is NAME=LETTERS, served with the plugin, or `plain`; `--engine` has more of SGLang's arguments. Servers of
conditions start at once and are ended; those of `--endpoint` stay. Needs SGLang, not the servers' tokenizer.

bench_serving runs one server at a time, half of its prompts before and half after the turns of indexcache-eval, so that
a drift of the machine hits both alike. It sees no token of a server without a tokenizer, which sends ids without text:
here each event gets a text as bench_serving reads it. Its prompts are ids of another vocabulary (`--tokenizer`). Its
warm-up is off, since it sends the first prompt, which a prefix cache then has; a prompt is sent before instead.

Prints medians and differences, writes JSON, and ends with 1 if one is beyond `--allowed`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from indexcache_search import demo
from indexcache_search.engines.own_server import free_port
from indexcache_search.results.schema import SpeedRow
from indexcache_search.results.variant import NAMED, Variant
from indexcache_speed.servers import check
from indexcache_speed.timed_request import send
from indexcache_speed.turns import Load, Timed, measured
from scripts.bench.serving.conditions import flags
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern
from sglang_indexcache.http.address import Address
from sglang_indexcache.http.client import ServerError, ask

PLAIN = "plain"
START_SECONDS = 900
POOL = np.arange(100, 1000, dtype=np.int32)
METRICS = ("first_token_ms", "token_ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conditions", nargs="*", help="NAME=LETTERS, or plain")
    parser.add_argument("--endpoint", action="append", default=[], help="a running server, in the place of conditions")
    parser.add_argument("--model", type=Path, help="folder with config.json, of conditions")
    parser.add_argument("--engine", default="{}", help="more of SGLang's arguments by name, JSON")
    parser.add_argument("--lengths", default="32768,131072", help="tokens of a prompt")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6, help="an even number")
    parser.add_argument("--tokenizer", default=str(demo.MODEL), help="whose vocabulary bench_serving draws ids from")
    parser.add_argument("--allowed", type=float, default=0.03, help="largest difference, as a share")
    parser.add_argument("--output", type=Path, default=Path("bench_speed.json"))
    options = parser.parse_args()
    if bool(options.endpoint) == bool(options.conditions) or (options.conditions and options.model is None):
        parser.error("expected either conditions with --model, or --endpoint")
    with contextlib.ExitStack() as stack:
        servers = {url: url for url in options.endpoint} or started(options, stack)
        results = [compared(servers, int(length), options) for length in map(str.strip, options.lengths.split(","))]
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    worst = max(abs(cell["difference"]) for result in results for cell in result["cells"])
    print(f"largest difference {worst:.1%}, allowed {options.allowed:.1%}")
    sys.exit(0 if worst <= options.allowed else 1)


def started(options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, str]:
    """Start a server for each condition; return their URLs by name."""
    folder, found = Path(stack.enter_context(tempfile.TemporaryDirectory())), {}
    processes = {}
    for condition in options.conditions:
        name, _, letters = condition.partition("=")
        letters = re.sub(r"([FS]+)\*(\d+)", lambda match: match[1] * int(match[2]), letters)
        module, pattern = "sglang.launch_server", []
        if name != PLAIN:
            module = "sglang_indexcache.launch_server"
            file = write_pattern(Pattern.parse(letters), options.model, folder / f"{name}.yaml")
            pattern = ["--indexcache-pattern", file]
        port = free_port()
        command = [sys.executable, "-m", module, "--model-path", str(options.model), "--port", str(port), *pattern]
        log = stack.enter_context(options.output.with_suffix(f".{name}.log").open("w"))
        process = subprocess.Popen(
            [*command, *flags(json.loads(options.engine))],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(end, process)
        processes[name], found[name] = process, f"http://127.0.0.1:{port}"
    for name, process in processes.items():
        wait(process, found[name])
        print(f"{name}: up at {found[name]}", flush=True)
    return found


def wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(ServerError):
            ask(url, "/v1/models", TypeAdapter(dict[str, Any]))
            return
        time.sleep(1)
    raise SystemExit(f"{url} did not start, see its log")


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def compared(servers: dict[str, str], length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time prompts of one length on all servers with both clients, and print what each found."""
    load = Load(context=length, output_tokens=options.output_tokens, turns=options.turns)
    addresses = {name: Address.of(url) for name, url in servers.items()}
    check(list(addresses.values()), [load])
    items = [Timed(Variant(NAMED, name, None, None), partial(send, address)) for name, address in addresses.items()]
    theirs: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in METRICS} for name in servers}
    add(theirs, servers, load, options)
    ours = {row.name: row for row in measured(items, load, POOL, "")}
    add(theirs, servers, load, options)
    cells = [cell(name, kind, row, theirs[name][kind]) for name, row in ours.items() for kind in METRICS]
    print(f"{length} tokens, {load.output_tokens} generated, {load.turns} prompts")
    for item in cells:
        print(
            f"  {item['server']:<24} {item['metric']:<14} here {item['here']:10.3f} ({item['low']:.3f} to"
            f" {item['high']:.3f})  bench_serving {item['bench_serving']:10.3f} ({min(item['every']):.3f} to"
            f" {max(item['every']):.3f})  {item['difference']:+.2%}",
            flush=True,
        )
    return {"length": length, "cells": cells, "rows": [row.model_dump(mode="json") for row in ours.values()]}


def cell(name: str, kind: str, row: SpeedRow, theirs: Sequence[float]) -> dict[str, Any]:
    """Return both clients' medians of one metric."""
    here, median = getattr(row, kind), statistics.median(theirs)
    found = {"server": name, "metric": kind, "here": here.median, "low": here.low, "high": here.high}
    return {**found, "bench_serving": median, "every": theirs, "difference": here.median / median - 1}


def add(
    theirs: dict[str, dict[str, list[float]]], servers: dict[str, str], load: Load, options: argparse.Namespace
) -> None:
    """Run bench_serving on each server, with half of the prompts."""
    rng = np.random.default_rng()
    for name, url in servers.items():
        send(Address.of(url), rng.choice(POOL, (1, load.context)).tolist(), load.output_tokens)
        found = bench_serving(url, load, math.ceil(load.turns / 2), options.tokenizer)
        for kind, values in found.items():
            theirs[name][kind] += values


def bench_serving(url: str, load: Load, prompts: int, tokenizer: str) -> dict[str, list[float]]:
    """Return bench_serving's milliseconds to the first token, and of each later one, of every prompt.

    Raises:
        SystemExit: with what it printed, if not all requests succeeded.
    """
    from sglang.benchmark import serving

    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "result.jsonl", Path(folder) / "log"
        arguments = [
            *("bench_serving", "--backend", "sglang", "--base-url", url, "--model", tokenizer),
            *("--tokenizer", tokenizer, "--tokenize-prompt", "--dataset-name", "random-ids"),
            *("--random-input-len", str(load.context), "--random-output-len", str(load.output_tokens)),
            *("--random-range-ratio", "1.0", "--num-prompts", str(prompts), "--max-concurrency", "1"),
            *("--seed", str(secrets.randbelow(1 << 31)), "--warmup-requests", "0", "--disable-tqdm"),
            *("--output-file", str(output), "--output-details"),
        ]
        with log.open("w") as file, contextlib.redirect_stdout(file), with_text(serving), given(arguments):
            serving.cli_main()
        result = json.loads(output.read_text())
        if result["completed"] != prompts or any(result["errors"]):
            raise SystemExit(f"{log.read_text()}\n{result['errors']}")
        wrong = [count for count in result["output_lens"] if count != load.output_tokens]
        if wrong or set(result["input_lens"]) != {load.context}:
            raise SystemExit(f"bench_serving read {wrong} tokens, expected {load.output_tokens} of each prompt")
    return {
        "first_token_ms": [1e3 * value for value in result["ttfts"]],
        "token_ms": [1e3 * statistics.fmean(values) for values in result["itls"]],
    }


@contextlib.contextmanager
def with_text(serving: Any) -> Iterator[None]:
    """Let bench_serving see a text in each event that has tokens and none."""
    original = serving.orjson

    def loads(data: bytes) -> Any:
        event = original.loads(data)
        if isinstance(event, dict) and event.get("output_ids") and not event.get("text"):
            event["text"] = "x"
        return event

    serving.orjson = types.SimpleNamespace(**{**vars(original), "loads": loads})
    try:
        yield
    finally:
        serving.orjson = original


@contextlib.contextmanager
def given(arguments: list[str]) -> Iterator[None]:
    """Give a command line to a function that reads it from `sys.argv`."""
    before, sys.argv = sys.argv, arguments
    try:
        yield
    finally:
        sys.argv = before


if __name__ == "__main__":
    main()
