"""Serve a model without and with patterns on this CPU, and let each gate say which pattern is broken.

    scripts/run.sh --sglang python -m scripts.bench.serving.gates --model build/model --data build/language/data \
        --pattern searched=LETTERS --pattern broken=LETTERS --output build/gates

Of each pattern a server logs what clients send, texts and lookups. Then `indexcache-watch` scores these requests again
on a server without one, `indexcache-eval --max-increase` compares the losses of both on held-out data, and `--harness`
their answers to lookups, which stand at the end, so that servers with blocks can be compared. `OUTPUT/gates.json` has
the exit codes and what each said. Data are the rows that `scripts.bench.search.language_model` writes. A gate that has
spoken is not asked again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import yaml

from indexcache_search.hf.loading import load_tokenizer
from scripts.bench.serving.conditions import Condition, ports
from scripts.bench.serving.engines import Limit
from scripts.bench.serving.http_servers import Server
from scripts.tools.inprocess import ARGUMENTS, ENVIRONMENT
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.pattern.indexer_setting import EXACT_ROWS

LOGGED = {"log_requests": True, "log_requests_level": 3, "log_requests_format": "json"}
SECONDS = 600.0  # until a server is up, or has answered
TOKENS = 8  # that a client asks for, and of a lookup's answer at most
SOURCES = ("text", "code", "recall")
LOOKED_UP = 3  # lookups that clients ask for each text


@dataclass(frozen=True)
class Lookup:
    """A row that ends in an answer, which its prompt asks for."""

    ids: list[int]
    first: int
    last: int

    @classmethod
    def of(cls, row: Mapping[str, list[int]]) -> Lookup | None:
        """Take the last answer of a row; `None` if it is long, or begins before what servers read query by query."""
        mask = row["loss_mask"]
        last = len(mask) - mask[::-1].index(1)
        first = next(at for at in range(last, -1, -1) if not mask[at - 1])
        return cls(row["input_ids"], first, last) if last - first <= TOKENS and first > len(mask) - EXACT_ROWS else None


def rows_of(options: argparse.Namespace, source: str) -> list[dict[str, list[int]]]:
    """Return the held-out rows of a source."""
    path = options.data / f"held-out-{source}-{options.length}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def lookups(options: argparse.Namespace, times: int = 1) -> list[Lookup]:
    """Return `times` as many lookups as are requested, whose prompts are the same tokens when they are written as text.

    Raises:
        SystemExit: if there are fewer.
    """
    tokenizer, found = load_tokenizer(str(options.model)), []
    for lookup in filter(None, map(Lookup.of, rows_of(options, "recall"))):
        prompt = lookup.ids[: lookup.first]
        if tokenizer.encode(tokenizer.decode(prompt), add_special_tokens=False) == prompt:
            found.append(lookup)
    if len(found) < times * options.requests:
        expected = times * options.requests
        raise SystemExit(f"{len(found)} lookups end in a short answer and are the same as text, not {expected}")
    return found[: times * options.requests]


def held_out(options: argparse.Namespace) -> list[Path]:
    """Return the files of the comparison: text and code as they are, and of lookups those that clients ask."""
    path = options.output / f"lookups-{options.length}.jsonl"
    rows = []
    for item in lookups(options):
        mask = [int(item.first <= at < item.last) for at in range(len(item.ids))]
        rows.append(json.dumps({"input_ids": item.ids, "loss_mask": mask}) + "\n")
    path.write_text("".join(rows))
    return [options.data / f"held-out-{source}-{options.length}.jsonl" for source in SOURCES[:-1]] + [path]


def traffic(options: argparse.Namespace) -> list[list[int]]:
    """Return prompts in turns: text, code, and `LOOKED_UP` lookups."""
    texts = [[row["input_ids"][:-TOKENS] for row in rows_of(options, source)] for source in SOURCES[:-1]]
    asked = [item.ids[: item.first] for item in lookups(options, LOOKED_UP)]
    turns = zip(*texts, *(asked[first::LOOKED_UP] for first in range(LOOKED_UP)), strict=False)
    return [prompt for turn in turns for prompt in turn]


def ask(server: Server, prompts: Sequence[Sequence[int]]) -> None:
    """Send what clients send; the server logs it with its replies."""
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0, "top_p": 0.95}
    for prompt in prompts:
        body = json.dumps({"input_ids": list(prompt), "sampling_params": sampling}).encode()
        request = Request(f"{server.url}/generate", body, {"content-type": "application/json"})  # noqa: S310
        with urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            json.load(answer)


@contextmanager
def serving(options: argparse.Namespace, condition: Condition, places: Iterator[dict[str, int]]) -> Iterator[Server]:
    """Serve under a condition until the block ends."""
    common = {**ARGUMENTS, "max_total_tokens": 8 * options.length, "sleep_on_idle": True}
    server = Server.start(condition, common, options.model, next(places), options.output / f"{condition.name}.log")
    try:
        server.wait(SECONDS, Limit())
        yield server
    finally:
        server.end()


def write_task(options: argparse.Namespace) -> None:
    """Write a task for lm-eval, of lookups whose answers have as many tokens as most."""
    folder = options.output / "tasks"
    folder.mkdir(exist_ok=True)
    tokenizer = load_tokenizer(str(options.model))
    asked = lookups(options, LOOKED_UP)
    tokens = Counter(item.last - item.first for item in asked).most_common(1)[0][0]  # all that is generated must match
    rows = []
    for item in asked:
        text, answer = (tokenizer.decode(part) for part in (item.ids[: item.first], item.ids[item.first : item.last]))
        if item.last - item.first == tokens:
            rows.append({"prompt": text, "answer": answer})
    rows = rows[: options.requests]
    data = folder / "lookups.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "lookup",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": {"max_gen_toks": tokens, "until": ["\n\n"]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "lookup.yaml").write_text(yaml.safe_dump(task))


def gates(
    options: argparse.Namespace, reference: Server, served: Server, name: str
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each gate's name and command."""
    both = ["--endpoint", reference.url, "--endpoint", served.url]
    logs, output = options.output / "logs" / name, options.output / name
    servers = ["--served", served.url, "--reference", reference.url, "--requests", str(logs)]
    buckets = ",".join(str(options.length // part) for part in (4, 2, 1))
    watched = [*servers, "--rate", "100", "--buckets", buckets, "--output", str(output / "watch")]
    yield "watch", [sys.executable, "-m", "indexcache_watch", *watched]
    evaluate = [sys.executable, "-c", "from indexcache_search.__main__ import evaluate; evaluate()"]
    sources = [word for path in held_out(options) for word in ("--evaluation", str(path))]
    sizes = ["--seq-len", str(options.length), "--num-sequences", str(len(SOURCES) * options.requests)]
    limits = ["--max-increase", str(options.max_increase), "--output", str(output / "eval")]
    yield "eval", [*evaluate, "--model", str(options.model), *both, *sources, *sizes, *limits]
    task = f"lookup:include={options.output / 'tasks'},concurrency=1,max_fall=0.1"
    harness = ["--model", str(options.model), *both, "--harness", task, "--output", str(output / "harness")]
    yield "harness", [*evaluate, *harness]


def main(options: argparse.Namespace) -> None:
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "gates.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    patterns = dict(item.split("=", 1) for item in options.pattern)
    left = [name for name in patterns if len(found.get(name, {})) < 3]
    if not left:
        return
    write_task(options)
    prompts, places = traffic(options), ports()
    own = [{**ENVIRONMENT, "SGLANG_CPU_OMP_THREADS_BIND": core, "SGLANG_DSA_FUSE_TOPK": "0"} for core in "01"]
    with serving(options, Condition("reference", None, {"env": own[0]}), places) as reference:
        for name in left:
            logs = {**LOGGED, "log_requests_target": str(options.output / "logs" / name)}
            condition = replace(Condition.parse(f"{name}={patterns[name]}"), arguments={"env": own[1], **logs})
            with serving(options, condition, places) as served:
                if "watch" not in found.get(name, {}):
                    ask(served, prompts)
                for gate, command in gates(options, reference, served, name):
                    if gate in found.setdefault(name, {}):
                        continue
                    began = time.monotonic()
                    done = subprocess.run(command, capture_output=True, text=True)
                    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
                    found[name][gate] = {"exit_code": done.returncode, "said": said}
                    write_atomically(path, json.dumps(found, indent=1) + "\n")
                    print(f"{name}, {gate}: exit code {done.returncode} after {time.monotonic() - began:.0f} s")
                    print("\n".join(said[-6:]), flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder of held-out-SOURCE-LENGTH.jsonl")
    parser.add_argument("--pattern", action="append", required=True, help="NAME=LETTERS; repeatable")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--requests", type=int, default=12, help="of each source, of clients and of each gate")
    parser.add_argument("--max-increase", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=Path("build/gates"))
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
