"""The command line: indexcache-offload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from indexcache_lab.offload.server import Server
from indexcache_lab.options import GIGABYTES
from indexcache_search import demo
from indexcache_search.cli import options
from indexcache_search.cli.bounded import SEQUENCES, TWO_TOKENS, Bounds
from indexcache_search.cli.command import Config, OptionNeed, Version, application, number, option, running, settings
from indexcache_search.cli.engines import EngineChoice
from indexcache_search.console import results
from indexcache_search.errors import SearchError
from sglang_indexcache import process
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.http.address import Address

EPILOG = f"""
Examples:

\b
  indexcache-offload
      The demo model and the pattern that indexcache-search found for it.

\b
  indexcache-offload --model ./my-dsa-model --pattern deploy/mine/pattern.yaml@1/4 --evaluation traffic.jsonl \\
        --seq-len 32768 --device cuda --dtype bfloat16 \\
        --server step_ms=31,batch=16,memory_gb=80,context=131072
      What a server's step and memory become with SGLang's HiSparse, on text like your traffic.

\b
  indexcache-offload --model Qwen/Qwen3-8B --pattern deploy/qwen3/pattern.yaml --evaluation traffic.jsonl \\
        --seq-len 16384 --selection score=compressed_keys,pages=32,steps=none/ema:0.9/bounded:2 \\
        --device cuda --dtype bfloat16
      A dense model: what policies lose, and what they bring.

\b
  indexcache-offload --model zai-org/GLM-5-FP8 --endpoint http://10.0.0.1:30000 \\
        --pattern deploy/glm5/pattern.yaml@1/4 --evaluation traffic.jsonl --seq-len 32768 \\
        --server bandwidth=54,step_ms=31,batch=16
      A model that runs in SGLang alone: started with `launch_server --indexcache-calibrate` (docs/calibrate.md).

{exit_codes("nothing is within --max-transfer or --max-device-gb, or a loss was not finite")}
"""

HERE = OptionNeed("a model that runs here, without --endpoint", lambda given: not given["endpoint"])
NEEDS = dict.fromkeys(("engine", "device", "dtype"), (HERE,))


@dataclass(frozen=True, kw_only=True)
class BuffersChoice:
    """Sizes of device buffers, in units of a query's selection."""

    sizes: tuple[Annotated[float, Bounds(1, 1000)], ...] = (1, 1.5, 2, 3, 4)


def offload(
    context: typer.Context,
    *,
    model: options.Model = None,
    pattern: options.Patterns = None,
    selection: options.Selections = None,
    evaluation: options.HeldOut = None,
    rows: options.Rows = None,
    seq_len: options.SeqLen = None,
    num_sequences: Annotated[int | None, number("Sequences, of all sources together. Default: 24.", SEQUENCES)] = None,
    decode_steps: Annotated[
        int, number("Last tokens of each sequence, which count as decoded behind the others.", TWO_TOKENS)
    ] = 128,
    buffers: Annotated[
        BuffersChoice | None,
        settings(
            BuffersChoice,
            "Sizes of device buffers, in units of what a query selects; at least 1. Default: 1,1.5,2,3,4.",
            "SIZE,...",
        ),
    ] = None,
    server: Annotated[
        Server | None,
        settings(
            Server,
            "Keys: bandwidth (GB/s from host memory to the device; measured with --device cuda), step_ms (of a decode"
            " step with all of the cache on the device), batch (requests of a step; 1), memory_gb (device memory for"
            " caches), context (tokens of a request; of a sequence), kv_dtype (fp8_e4m3 or bfloat16).",
        ),
    ] = None,
    max_transfer: Annotated[
        float | None,
        number("MB a step may bring for a request: writes the best plan as pattern.yaml.", Bounds(0, 1e9)),
    ] = None,
    max_device_gb: Annotated[
        float | None, number("GB that a request may hold on the device; likewise.", GIGABYTES)
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        option(
            "DSA: an SGLang server in calibration mode that runs the model, and counts; repeatable. --model is its"
            " configuration and tokenizer.",
            metavar="URL",
        ),
    ] = None,
    engine: options.Engine = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    output: Annotated[Path, option("Folder of the results.")] = Path("indexcache-offload"),
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
) -> None:
    """Count what decoding brings from host memory when most of a model's cache is there (as with SGLang's HiSparse).

    Which tokens or pages each decode step selects is taken from the model on your text; a buffer of each size keeps
    what was used last. Layers that share a choice have theirs on the way while others compute. The checkpoint's own
    pattern is always counted. Writes offload.json and offload.html, and with limits pattern.yaml.
    """
    machine, chosen, is_demo = server or Server(), engine or EngineChoice(), model is None
    with running(context, NEEDS) as console:
        options.check_runs_here(device, dtype)
        if not is_demo and not evaluation:
            raise SearchError("--evaluation is missing, expected a file, folder or hub id with text like your traffic")
        addresses, row_options = tuple(map(Address.of, endpoint or ())), options.row_options(rows)
        from indexcache_lab.offload.result import Limits
        from indexcache_lab.offload.run import PlanRequest, run, show
        from indexcache_search.data.packing import Wish
        from indexcache_search.eval.held_out import ComparisonData

        limits = Limits(
            bytes_a_step=None if max_transfer is None else max_transfer * 1e6,
            device_bytes=None if max_device_gb is None else max_device_gb * 1e9,
        )
        asked = PlanRequest(
            patterns=tuple(pattern or ([f"{demo.PATTERNS[0]}@1/4"] if is_demo else [])),
            selections=options.selections_of(selection),
            data=ComparisonData(
                sources=tuple(evaluation or demo.EVALUATION),
                seq_len=seq_len or (512 if is_demo else None),
                sequences=num_sequences or Wish(24),
                rows=row_options,
            ),
            steps=decode_steps,
            buffers=tuple(sorted(set((buffers or BuffersChoice()).sizes))),
            endpoints=addresses,
            limits=None if max_transfer is None and max_device_gb is None else limits,
        )
        runtime = chosen.run(options.ENGINE_DEFAULTS, device=device, dtype=dtype)
        process.let_work_end()
        found = run(model or str(demo.MODEL), asked, machine, runtime, output, restart=restart, console=console)
        show(found, model, output, results())
        if found.limits is not None and found.choice is None:
            raise typer.Exit(1)


app = application({"indexcache-offload": offload}, EPILOG)
