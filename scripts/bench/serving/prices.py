"""Measure what each kind of layer takes in prompts and while decoding, and write a latency table. Needs SGLang, a GPU.

    python -m scripts.bench.serving.rank_model /tmp/glm-5-tp8
    python -m scripts.bench.serving.prices --model /tmp/glm-5-tp8 --name glm-5-tp8-h200 --collectives all_reduce.json \
        --engine '{"kv_cache_dtype": "bfloat16", "chunked_prefill_size": 8192, ...}' --output glm-5-tp8-h200.json \
        plan=FFFFSSFFFSSFSSSS+0q4+1q16

Engines run one after the other, since experts fill a GPU: `kinds`, whose layers are of all kinds (`F` and `S`, exact
and in blocks) and are timed one by one, see `layer_times`; `plain`, SGLang without the plugin; and patterns given as
NAME=LETTERS, with which the sums of the table are compared. What an engine measured is kept in `--work`, and not
measured again: so a table can be made in several calls. Lengths are multiples of the chunk; the shorter ones are parts
of the longest.

Exits with 1 if whole prompts differ from the table by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scripts.bench.serving.conditions import PLAIN, Condition, ports
from scripts.bench.serving.engines import Engine
from scripts.bench.serving.layer_times import cumulated
from scripts.bench.serving.price_table import KINDS, Measured, Shape, content_of, of_all_kinds
from sglang_indexcache.pattern.indexer_setting import QUERIES

BOUND = 0.05
TIMED = ["model.embed_tokens", *(f"model.layers.{name}{part}" for name in ("?", "??") for part in ("", ".self_attn"))]


def main() -> None:
    options = _parsed()
    engine = json.loads(options.engine)
    shape = Shape.read(options.model, engine, tuple(map(int, options.queries.split(","))))
    lengths = [int(item) for item in options.lengths.split(",")]
    shape.check(lengths)
    options.work.mkdir(parents=True, exist_ok=True)
    started = [Condition(KINDS, of_all_kinds(shape.layers, shape.queries)), Condition(PLAIN, None), *options.checks]
    conditions, places = {item.name: letters_of(item) for item in started}, ports()
    for name, condition in zip(conditions, started, strict=True):
        file = options.work / f"{name}.json"
        if not file.exists() and (not options.only or name in options.only.split(",")):
            file.write_text(json.dumps(measured(condition, options, shape, lengths, next(places))))
    missing = [name for name in conditions if not (options.work / f"{name}.json").exists()]
    if missing:
        print(f"no table yet: {', '.join(missing)} will be measured by the next call", flush=True)
        return
    found = {name: json.loads((options.work / f"{name}.json").read_text()) for name in conditions}
    given = json.loads(options.collectives.read_text()) if options.collectives else None
    content = content_of(Measured(shape, lengths, conditions, found), options.name, given, options.notes)
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {options.output}", flush=True)
    for check in content["checks"]:
        print(check, flush=True)
    if far := [check for check in content["checks"] if abs(check["expected_ms"] / check["measured_ms"] - 1) > BOUND]:
        raise SystemExit(f"{len(far)} of {len(content['checks'])} whole prompts differ by more than {BOUND:.0%}")


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "checks", nargs="*", type=Condition.parse, help="NAME=LETTERS, whole prompts to compare the table with"
    )
    parser.add_argument("--model", required=True, type=Path, help="folder of `scripts.bench.serving.rank_model`")
    parser.add_argument("--name", required=True, help="name of the table")
    parser.add_argument(
        "--lengths", default="16384,32768,65536,131072,196608", help="tokens of the prompts, the longest last"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--queries",
        default=",".join(map(str, (1, *QUERIES))),
        help="sizes of blocks, 1 first; 1 alone for a table of F and S",
    )
    parser.add_argument("--engine", default="{}", help="arguments of sglang.Engine, JSON")
    parser.add_argument(
        "--hooked",
        default='{"cuda_graph_backend_prefill": "disabled"}',
        help="more arguments of the engine whose layers are timed, JSON: without graphs of prompts; {} up to 0.5.20",
    )
    parser.add_argument(
        "--collectives",
        type=Path,
        help="output of `scripts.bench.serving.all_reduce`, if one GPU is one of several ranks",
    )
    parser.add_argument("--greedy", default="300,3000,9000", help="tokens of prompts that each engine answers first")
    parser.add_argument("--notes", default="", help="what else a reader must know")
    parser.add_argument("--work", type=Path, help="folder of what engines measured; NAME.work beside --output")
    parser.add_argument("--only", help="engines to run in this call: kinds, plain, names of checks")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.work = options.work or options.output.with_suffix(".work")
    return options


def letters_of(condition: Condition) -> str:
    """Return the letters of a condition; empty for SGLang without a pattern."""
    return "" if condition.pattern is None else condition.pattern.letters


def measured(
    condition: Condition, options: argparse.Namespace, shape: Shape, lengths: list[int], place: dict[str, int]
) -> dict[str, Any]:
    """Run one engine; return times of whole prompts by length, and of `kinds` those of its layers."""
    name, times, arguments = condition.name, options.work / "times.jsonl", json.loads(options.engine)
    if name == KINDS:
        times.unlink(missing_ok=True)
        arguments |= json.loads(options.hooked) | {"forward_hooks": hooks(times, shape.chunk // shape.cp)}
        if arguments.get("cuda_graph_backend_prefill") == "disabled":
            arguments.pop("cuda_graph_bs_prefill", None)
    hooked = argparse.Namespace(**vars(options) | {"engine": json.dumps(arguments)})
    engine = Engine(condition, hooked, options.work, place)
    try:
        answer = engine.ready()
        print(f"{name}: up in {answer['start_s']:.0f} s, serves {answer['serves']}", flush=True)
        found: dict[str, Any] = {"whole": {}}
        for length in lengths:
            turns = [answered(engine, length, turn) for turn in range(options.rounds + 1)][1:]  # one warms up
            found["whole"][str(length)] = {kind: [turn[kind] for turn in turns] for kind in ("prefill_ms", "decode_ms")}
            print(f"{name}, {length}: {found['whole'][str(length)]['prefill_ms']}", flush=True)
        if name == KINDS:
            answered(engine, 64, 0)  # a chunk's times are written when the next one begins
            chunks = lengths[-1] // shape.chunk
            found |= {kind: cumulated(times, chunks, options.rounds, kind) for kind in ("ms", "behind_ms")}
    finally:
        engine.end()
    about = dict(answer["about"])
    return found | {"device": about.pop("device"), "versions": about}


def answered(engine: Engine, length: int, turn: int) -> dict[str, Any]:
    """Time one prompt.

    Raises:
        SystemExit: if it can't be.
    """
    answer = engine.ask(cell=str(length), turn=turn)
    if "error" in answer:
        raise SystemExit(f"{engine.condition.name}, {length} tokens: {answer['error']}")
    return answer


def hooks(file: Path, chunk: int) -> list[dict[str, Any]]:
    """Return the value of `--forward-hooks`."""
    return [
        {
            "name": "times",
            "target_modules": TIMED,
            "hook_factory": "scripts.bench.serving.layer_times:recorder",
            "config": {"file": str(file), "tokens": chunk},
        }
    ]


if __name__ == "__main__":
    main()
