"""Times of a decode step over selected pages, beside stock attention. Needs SGLang and a CUDA device.

    python -m scripts.bench.serving.delta --shape 7b --cells 1x32768,16x16384,64x16384
    python -m scripts.bench.serving.delta --shape 7b --one-layer --cells 16x16384,32x16384,64x16384 --dense 7 \
        --mixed 1+6,3+4,1+6:ema:0.9,1+6:refresh:8
    python -m scripts.bench.serving.delta --files searched.yaml,other.yaml
    python -m scripts.bench.serving.delta --check

Stock flashinfer and patterns of 5 and 7 D layers take turns in one process (a b c c b a), on one model and one cache;
CUDA graphs are captured anew for each. --mixed adds patterns of so many D and F layers, D first, which select by
--score, with a policy if one is named; the layers are those that as many D layers alone would be. --files takes any
pattern files made for the shape; their model is not looked at. Other stock backends have a process of their own,
with the same flags. Weights are random, and so are keys and values: nothing is prefilled, and the selected pages lie
wherever the scores have them. A step is `ModelRunner.forward` of a batch at that length, with the plans that it makes;
the same step is run again and again. `alone`: with a synchronisation behind each, the median. `queued`: ten without
one, as SGLang's overlap scheduler runs them, so that what the host does is hidden as far as it can be; the median of
tens. The fastest turn counts. With --one-layer all layers have the weights of the first, which are read as often: more
of the device is left for keys.

--check compares decoded log-probabilities: with room for all against stock, bit for bit, and with few pages
graphs against eager passes and flashinfer against `torch_native`, whose pages are selected by the kernels' definitions;
the same with F layers, without memory, averaging scores and holding pages.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import COMPRESSED_KEYS, DEFAULT, OWN_SCORES, Score, Selection
from scripts.bench import child
from scripts.bench.serving.decode_steps import CHECKED, decode, measure
from scripts.bench.shapes import SHAPES, config_of, parse_cells
from scripts.tools.pattern_files import write_pattern
from sglang_indexcache import Pattern

FEW = Selection(page_tokens=16, pages=8, recent_pages=2, sink_pages=0, score="token_max")
MIXED = ("mixed", "mixed:ema:0.7", "mixed:refresh:3")  # conditions with F layers


def dense_layers(layers: int, count: int) -> list[int]:
    """Return the first three layers, as the paper has them, and others at equal distances."""
    others = count - 3
    return [0, 1, 2, *(3 + (layers - 3) * (number + 1) // (others + 1) for number in range(others))]


def write(model: Path, layers: list[int], selection: Selection, path: Path) -> str:
    """Write a pattern file of D layers."""
    count = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    return write_pattern(Pattern.from_full_layers(count, layers, selection), model, path)


def write_mixed(
    model: Path, own: list[int], dense: list[int], selection: Selection, steps: str, path: Path, score: Score
) -> str:
    """Write a pattern file whose layers `dense` are D and `own` are F, which select by `score`."""
    count = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    letters = "".join("D" if layer in dense else "F" if layer in own else "S" for layer in range(count))
    mixed = replace(selection, score=score, steps=ReusePolicy.parse(steps or "none"))
    return write_pattern(Pattern(letters, mixed), model, path)


def run(condition: str, options: argparse.Namespace, model: Path, engine: dict[str, Any], *more: str) -> dict[str, Any]:
    """Return the result of a condition's process."""
    pattern, _, backend = condition.rpartition("@")
    engine = {**engine, "attention_backend": backend}
    arguments = ["--child", "--model", str(model), "--cells", options.cells, "--repeats", str(options.repeats)]
    arguments += ["--engine", json.dumps(engine), *more, *(["--one-layer"] if options.one_layer else [])]
    found, _ = child.result_of(child.start("scripts.bench.serving.delta", arguments, pattern))
    if bool(pattern) != found.get("backend", "").startswith("PageSelecting"):
        raise SystemExit(f"{condition}: ran {found['backend']}; patterns need the plugin installed")
    return found


def bench(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every condition's times, and print them beside those of the fastest stock backend."""
    layers = SHAPES[options.shape]["sizes"][0]
    selection = replace(
        DEFAULT, page_tokens=options.page_tokens, pages=options.pages, recent_pages=max(1, options.pages // 8)
    )
    paths = [
        write(folder, dense_layers(layers, int(count)), selection, folder / f"{count}.yaml")
        for count in filter(None, options.dense.split(","))
    ]
    for number, plan in enumerate(filter(None, options.mixed.split(","))):
        counts, _, steps = plan.partition(":")
        dense, own = map(int, counts.split("+"))
        chosen = dense_layers(layers, dense + own)
        paths.append(
            write_mixed(
                folder, chosen[dense:], chosen[:dense], selection, steps, folder / f"mixed{number}.yaml", options.score
            )
        )
    paths += filter(None, options.files.split(","))
    table: dict[str, dict[str, dict[str, float]]] = {}
    for backend in options.stock.split(","):
        patterns = ",".join(map(str, paths)) if backend == options.backend else ""
        found = run(f"@{backend}", options, folder, json.loads(options.engine), "--patterns", patterns)
        table |= found["times"]
        yield {"shape": options.shape, "one_layer": options.one_layer, "selection": str(selection), **found}
    cells = list(next(iter(table.values())))
    for way in ("alone", "queued"):
        print("| " + " | ".join([f"{options.shape}, {way}", *cells]) + " |\n|---" + "|---:" * len(cells) + "|")
        for name, by_cell in table.items():
            row = []
            for cell in cells:
                stock = min(other[cell][way] for key, other in table.items() if key.startswith("stock"))
                ratio = "" if name.startswith("stock") else f" ({stock / by_cell[cell][way]:.2f})"
                row.append(f"{by_cell[cell][way]:.2f}{ratio}")
            print("| " + " | ".join([name, *row]) + " |")


def check(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Compare the log-probabilities of several conditions."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config_of("tiny", 2048)))
    few = write(folder, [0, 1, 4], FEW, folder / "few.yaml")
    room = write(folder, [0, 1, 4], replace(FEW, pages=64, recent_pages=8), folder / "room.yaml")
    eager, sure = {"cuda_graph_backend_decode": "disabled"}, {"enable_deterministic_inference": True}
    conditions: dict[str, tuple[str, dict[str, Any]]] = {
        "stock": ("@flashinfer", {}),
        "stock, deterministic": ("@flashinfer", sure),
        "stock, eager": ("@flashinfer", eager),
        "stock torch_native": ("@torch_native", eager),
        "room": (f"{room}@flashinfer", {}),
        "room, deterministic": (f"{room}@flashinfer", sure),
        "room, eager, deterministic": (f"{room}@flashinfer", {**sure, **eager}),
        "few": (f"{few}@flashinfer", {}),
        "few, deterministic": (f"{few}@flashinfer", sure),
        "few, eager, deterministic": (f"{few}@flashinfer", {**sure, **eager}),
        "few torch_native": (f"{few}@torch_native", eager),
    }
    for name in MIXED:
        steps = name.partition(":")[2]
        file = write_mixed(folder, [2, 5], [0, 4], FEW, steps, folder / f"{name.replace(':', '-')}.yaml", options.score)
        conditions |= {
            name: (f"{file}@flashinfer", {}),
            f"{name}, deterministic": (f"{file}@flashinfer", sure),
            f"{name}, eager, deterministic": (f"{file}@flashinfer", {**sure, **eager}),
            f"{name} torch_native": (f"{file}@torch_native", eager),
        }
    wide = write_mixed(
        folder, [2, 5], [0, 4], replace(FEW, pages=64, recent_pages=8), "", folder / "wide.yaml", options.score
    )
    conditions["mixed room, deterministic"] = (f"{wide}@flashinfer", sure)
    begin = tuple(options.only.split(","))
    conditions = {name: condition for name, condition in conditions.items() if name.startswith(begin)}
    with ThreadPoolExecutor(4) as together:
        found = {
            name: together.submit(run, condition, options, folder, engine, "--logprobs", str(folder / f"{name}.pt"))
            for name, (condition, engine) in conditions.items()
        }
        for name, result in found.items():
            print(f"{name}: {result.result()}", flush=True)
            yield {"condition": name, **result.result()}
    logprobs = {name: torch.load(folder / f"{name}.pt") for name in conditions}
    for one, other in (
        ("stock, deterministic", "room, deterministic"),
        ("stock, deterministic", "room, eager, deterministic"),
        ("few, deterministic", "few, eager, deterministic"),
        ("stock", "stock torch_native"),
        ("stock", "stock, eager"),
        ("stock", "room"),
        ("few", "few torch_native"),
        ("few", "few, deterministic"),
        ("stock", "few"),
        ("stock, deterministic", "mixed room, deterministic"),
        *((f"{name}, deterministic", f"{name}, eager, deterministic") for name in MIXED),
        *((name, f"{name} torch_native") for name in MIXED),
        *(("stock", name) for name in MIXED),
        *(("mixed", name) for name in MIXED[1:]),
    ):
        if one not in logprobs or other not in logprobs:
            continue
        distance = (logprobs[one] - logprobs[other]).abs().amax(-1)  # [steps, requests]
        same = torch.equal(logprobs[one], logprobs[other])
        each = ", ".join(f"{length}: {value:.2e}" for length, value in zip(CHECKED, distance.amax(0), strict=True))
        print(f"{one} | {other}: {'bit for bit' if same else f'mean {distance.mean():.2e}, largest by prompt {each}'}")
        yield {"one": one, "other": other, "same": same, "distance": distance.tolist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--cells", default="1x32768,16x16384", help="requests x tokens in the cache")
    parser.add_argument("--dense", default="5,7", help="numbers of D layers")
    parser.add_argument("--mixed", default="", help="numbers of D and F layers and a policy: 3+4,1+6:ema:0.9")
    parser.add_argument("--score", default=COMPRESSED_KEYS, choices=OWN_SCORES, help="what F layers select by")
    parser.add_argument("--files", default="", help="pattern files of the same number of layers")
    parser.add_argument("--pages", type=int, default=DEFAULT.pages)
    parser.add_argument("--page-tokens", type=int, default=DEFAULT.page_tokens)
    parser.add_argument("--stock", default="flashinfer,triton", help="stock backends, that of the patterns among them")
    parser.add_argument("--backend", default="flashinfer", help="the one that serves patterns")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--one-layer", action="store_true", help="all layers share the weights of the first")
    parser.add_argument("--engine", default="{}", help="more arguments of SGLang's server, JSON")
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--only", default="", help="with --check: how the names of conditions begin, such as stock,mixed"
    )
    parser.add_argument("--output", type=Path, default=Path("bench_delta.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--patterns", default="", help=argparse.SUPPRESS)
    parser.add_argument("--logprobs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child.give(measure(options) if options.logprobs is None else decode(options))
    with tempfile.TemporaryDirectory() as name:
        folder, results = Path(name), []
        longest = max(context for _, context in parse_cells(options.cells)) + 256
        config = config_of("tiny", 2048) if options.check else config_of(options.shape, longest)
        (folder / "config.json").write_text(json.dumps(config))
        for result in check(options, folder) if options.check else bench(options, folder):
            results.append(result)
            options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
