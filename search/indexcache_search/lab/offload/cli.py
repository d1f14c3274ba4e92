"""The command line: indexcache-offload."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from indexcache_search import bounded, data_flags, demo, run_flags
from indexcache_search import selection_flags as flags
from indexcache_search.errors import SearchError
from indexcache_search.needs import Need, Needs, refuse_unread
from indexcache_search.terminal import errors_in_one_line, messages, results, serving
from sglang_indexcache import process
from sglang_indexcache.address import Address
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.spec import GRAMMAR

if TYPE_CHECKING:
    from rich.console import Console

    from indexcache_search.lab.offload.result import Limits, OffloadResult

EPILOG = f"""
Examples:

\b
  indexcache-offload
      The demo model and the pattern that indexcache-search found for it.

\b
  indexcache-offload --model ./my-dsa-model --pattern deploy/mine.yaml@1/4 --evaluation traffic.jsonl \\
        --seq-len 32768 --device cuda --dtype bfloat16 --step-ms 31 --batch 16 --memory-gb 80 --context 131072
      What a server's step and memory become with SGLang's HiSparse, on text like your traffic.

\b
  indexcache-offload --model Qwen/Qwen3-8B --pattern DDFSSSFSSSSS... --evaluation traffic.jsonl --seq-len 16384 \\
        --score compressed_keys --pages 32 --steps none,ema:0.9,bounded:2 --device cuda --dtype bfloat16
      A dense model: what policies lose, and what they bring.

\b
  indexcache-offload --model zai-org/GLM-5-FP8 --endpoint http://10.0.0.1:30000 --pattern deploy/glm5.yaml@1/4 \\
        --evaluation traffic.jsonl --seq-len 32768 --bandwidth 54 --step-ms 31 --batch 16
      A model that runs in SGLang alone: started with `launch_server --indexcache-calibrate` (docs/calibrate.md).

\b
{exit_codes("nothing is within --max-transfer or --max-device-gb, or a loss was not finite")}
"""

HERE = Need("a model that runs here, without --endpoint", lambda given: not given["endpoint"])
NEEDS: Needs = {
    **dict.fromkeys(("model", "pattern", "evaluation", "endpoint", "seq_len", "num_sequences", "decode_steps"), ()),
    **dict.fromkeys(("pages", "page_tokens", "recent_pages", "sink_pages", "score", "steps", "buffers"), ()),
    **dict.fromkeys(("kv_dtype", "bandwidth", "step_ms", "batch", "memory_gb", "context", "max_transfer"), ()),
    **dict.fromkeys(("max_device_gb", "output", "restart", "json_"), ()),
    **dict.fromkeys(("chat_template", "turns", "skip_bad_rows"), ()),
    **dict.fromkeys(("device", "dtype", "attention", "prefix_cache_gb"), (HERE,)),
}

_LARGEST = 1000  # buffers, in units of what a query selects: more than any cache has

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def offload(
    called: typer.Context,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the demo model.")] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",  # typer 0.27 takes a metavar that is the name for the flag
            help=f"{GRAMMAR}, with NAME= before it for the table; repeatable. The checkpoint's own is always there.",
            metavar="PATTERN",
        ),
    ] = None,
    evaluation: Annotated[
        list[str] | None, typer.Option(help="Text like your traffic; repeatable.", metavar="SOURCE")
    ] = None,
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="DSA: an SGLang server in calibration mode that runs the model, and counts; repeatable. --model is its"
            " configuration and tokenizer.",
            metavar="URL",
        ),
    ] = None,
    seq_len: run_flags.SeqLen = None,
    num_sequences: Annotated[
        int, typer.Option(help="Sequences, of all sources together.", callback=bounded.sequences())
    ] = 24,
    decode_steps: Annotated[
        int,
        typer.Option(
            help="Last tokens of each sequence, which count as decoded behind the others.", callback=bounded.tokens(2)
        ),
    ] = 128,
    pages: flags.PagesEach = "",
    page_tokens: flags.PageTokens = None,
    recent_pages: flags.RecentPages = None,
    sink_pages: flags.SinkPages = None,
    score: flags.Score = None,
    steps: flags.StepsEach = "",
    buffers: Annotated[
        str, typer.Option(help="Sizes of device buffers, in units of what a query selects; at least 1.")
    ] = "1,1.5,2,3,4",
    kv_dtype: Annotated[str, typer.Option(help="Of the served cache: bfloat16 or fp8_e4m3.")] = "fp8_e4m3",
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help="GB/s from host memory to the device. Default: measured, with --device cuda.",
            callback=bounded.within(1e-3, 1e6),
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="What a decode step of --batch requests takes with all of the cache on the device.",
            callback=bounded.within(1e-6, 1e9),
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests of a decode step.", callback=bounded.within(1, 1_000_000))] = 1,
    memory_gb: Annotated[
        float | None, typer.Option(help="Device memory for caches.", callback=bounded.within(1e-6, 1e6))
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Tokens of a served request. Default: those of a sequence.", callback=bounded.tokens()),
    ] = None,
    max_transfer: Annotated[
        float | None,
        typer.Option(
            help="MB that a step may bring for a request: writes the best of the plans as pattern.yaml.",
            callback=bounded.within(0, 1e9),
        ),
    ] = None,
    max_device_gb: Annotated[
        float | None,
        typer.Option(help="GB that a request may hold on the device; likewise.", callback=bounded.within(0, 1e6)),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for offload.json, offload.html and pattern.yaml.")] = Path(
        "indexcache-offload"
    ),
    restart: run_flags.Restart = False,
    device: run_flags.Device = "auto",
    dtype: run_flags.Dtype = "float32",
    attention: Annotated[str, typer.Option(help="auto, naive or kernels, see indexcache-search --help.")] = "auto",
    prefix_cache_gb: Annotated[
        float,
        typer.Option(
            help="Host memory for layer outputs; of dense models as much again for keys of prompts.",
            callback=bounded.within(0, 1e6),
        ),
    ] = 1.0,
    json_: Annotated[bool, typer.Option("--json", help="Print offload.json to stdout, nothing else.")] = False,
) -> None:
    """Count what decoding brings from host memory when most of a model's cache is there (as with SGLang's HiSparse).

    Which tokens or pages each decode step selects is taken from the model on your text; a buffer of each size keeps
    what was used last. Layers that share a choice have theirs on the way while others compute.
    """
    console = messages()
    with errors_in_one_line(console, "indexcache-offload"):
        refuse_unread(called, NEEDS)
        from indexcache_search.compare.run import Runtime
        from indexcache_search.lab.offload.run import Asked, Served, run

        is_demo = model is None
        if not is_demo and not evaluation:
            raise SearchError("--evaluation is missing, expected a file, folder or hub id with text like your traffic")
        if kv_dtype not in ("bfloat16", "fp8_e4m3"):
            raise SearchError(f"--kv-dtype is {kv_dtype}, expected bfloat16 or fp8_e4m3")
        asked = Asked(
            patterns=tuple(pattern or ([f"{demo.PATTERNS[0]}@1/4"] if is_demo else [])),
            selections=flags.selections_of(
                pages=pages,
                page_tokens=page_tokens,
                recent_pages=recent_pages,
                sink_pages=sink_pages,
                score=score,
                steps=steps,
            ),
            sources=tuple(evaluation or demo.EVALUATION),
            rows=data_flags.row_options(chat_template, turns, skip_bad_rows),
            seq_len=seq_len or (512 if is_demo else None),
            sequences=num_sequences,
            steps=decode_steps,
            buffers=_sizes(buffers),
            endpoints=tuple(map(Address.of, endpoint or ())),
            kv_dtype=kv_dtype,  # type: ignore[arg-type]  # one of these two
            limits=_limits(max_transfer, max_device_gb),
        )
        served = Served(bandwidth_gbs=bandwidth, step_ms=step_ms, batch=batch, memory_gb=memory_gb, context=context)
        runtime = Runtime(
            device=device, dtype=dtype, batch_size=1, prefix_cache_gb=prefix_cache_gb, attention=attention
        )
        process.let_work_end()
        found = run(model or str(demo.MODEL), asked, served, runtime, output, restart, console)
        nothing = found.limits is not None and found.choice is None
        if json_:
            sys.stdout.write(json.dumps(found.as_json(), indent=1) + "\n")
        else:
            _show(found, model, output, results())
        if nothing:
            raise typer.Exit(1)


def _show(found: OffloadResult, model: str | None, folder: Path, out: Console) -> None:
    """Print a table for each plan, what is best, and where the files are."""
    from indexcache_search.lab.offload import result

    for plan in found.plans:
        for table in result.terminal_tables(plan, out.width):
            out.print(table)
    names = ["offload.json", "offload.html", *(["pattern.yaml"] if found.choice else [])]
    said = result.sentence(found)
    if said is not None:
        out.print(said, soft_wrap=True)
    out.print(f"Wrote {', '.join(str(folder / name) for name in names)}", soft_wrap=True)
    if found.choice is not None:
        out.print(f"Next: {serving(folder / 'pattern.yaml', model or demo.MODEL)}", soft_wrap=True)


def _limits(max_transfer: float | None, max_device_gb: float | None) -> Limits | None:
    """What the flags say."""
    from indexcache_search.lab.offload.result import Limits

    if max_transfer is None and max_device_gb is None:
        return None
    return Limits(
        bytes_a_step=None if max_transfer is None else max_transfer * 1e6,
        device_bytes=None if max_device_gb is None else max_device_gb * 1e9,
    )


def _sizes(text: str) -> tuple[float, ...]:
    """Numbers from 1 on, ascending.

    Raises:
        SearchError: if one is something else.
    """
    sizes = []
    for word in text.split(","):
        try:
            size = float(word)
        except ValueError:
            size = math.nan
        if not 1 <= size <= _LARGEST:
            raise SearchError(f"--buffers: {word.strip()[:60]!r} is no number from 1 to {_LARGEST}")
        sizes.append(size)
    return tuple(sorted(set(sizes)))
