"""The command line: indexcache-search."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from indexcache_search import bounded, data_flags, demo, run_flags
from indexcache_search import selection_flags as flags
from indexcache_search.errors import SearchError
from indexcache_search.needs import Need, Needs, refuse_unread
from indexcache_search.objectives import Objective
from indexcache_search.strategies import DEFAULT_STRATEGY, STRATEGIES
from indexcache_search.strategies.prices import PRICE_CONTEXT
from indexcache_search.terminal import errors_in_one_line, messages, results
from sglang_indexcache import process
from sglang_indexcache.address import Address
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.pattern import parse_retention

DEMO_LENGTH = 512  # tokens a sequence; of other models 4 times `run_flags.FIRST_CHOICE`


EngineName = Literal["transformers", "sglang"]


EPILOG = f"""
Strategies, and what they evaluate (docs/reference/strategies.md):

\b
{chr(10).join(f"  {item.name:<12}{item.summary}" for item in STRATEGIES.values())}

Examples:

\b
  indexcache-search
      The demo: a small DSA model and its data, both in the package.

\b
  indexcache-search --engine sglang --model zai-org/GLM-5-FP8 --tp 8 --calibration sft.jsonl --seq-len 32768
      Your model, in SGLang on your GPUs (docs/calibrate.md), and your text: rows of text, conversations, prompts with
      answers or token ids (docs/reference/data.md); --dry-run says what is read, and ends. Without --engine sglang a
      model must fit one GPU, or the CPU.

\b
  indexcache-search --calibration long.parquet --calibration owner/dataset:subset --evaluation held_out.jsonl ...
      Several sources count equally, and so do the sequences of each. Without --evaluation, held-out text is set aside
      from the calibration sources.

\b
  indexcache-search ... --strategy greedy --objective nll
      The paper's Algorithm 1. Strategies share their evaluations in the same --work-dir.

\b
  indexcache-search --model Qwen/Qwen3-8B --calibration traces.jsonl --retain 1/6 --pages 64 --seq-len 8192
      A dense model: which layers attend to everything, and which to 64 pages that those chose (docs/dense-models.md).

\b
  indexcache-search ... --queries 4,16 --reply 1024 --retain 1/8 --decode-retain 1/4
      An eighth of the indexers' cost in prompts, where layers may select for 4 or 16 queries at a time, and a quarter
      of it while decoding (docs/blocks.md).

Run the same command again to go on after a kill, a crash or Ctrl-C.

\b
{exit_codes("the run failed (a loss was not finite)")}
"""

SGLANG = Need("--engine sglang", lambda given: given["engine"] == "sglang")
HERE = Need("--engine transformers", lambda given: given["engine"] == "transformers")
OWN = Need("a server of the search's own, without --endpoint", lambda given: not given["endpoint"])
LAZY = Need("--strategy lazy", lambda given: given["strategy"] == "lazy")
RACES = Need(
    "a strategy that looks at a part of the sequences first",
    lambda given: not given["race"] or given["strategy"] not in STRATEGIES or STRATEGIES[given["strategy"]].races,
)
PRICED = Need("--queries", lambda given: bool(given["queries"]))
WITH_RESULTS = Need("a run without --dry-run", lambda given: not given["dry_run"])
NEEDS: Needs = {
    **dict.fromkeys(("model", "engine", "calibration", "evaluation", "seq_len", "num_sequences"), ()),
    **dict.fromkeys(("num_eval_sequences", "output", "work_dir", "restart", "batch_size", "seed"), ()),
    **dict.fromkeys(("retain", "strategy", "swaps", "blocks", "reply", "objective"), ()),
    **dict.fromkeys(("chat_template", "turns", "skip_bad_rows", "dry_run"), ()),
    **dict.fromkeys(("report", "json_"), (WITH_RESULTS,)),
    **dict.fromkeys(("pages", "page_tokens", "recent_pages", "sink_pages", "score", "steps"), ()),
    **dict.fromkeys(("price_context", "decode_retain"), (PRICED,)),
    **dict.fromkeys(("device", "dtype"), (OWN,)),
    "endpoint": (SGLANG,),
    "candidates": (LAZY,),
    "race": (RACES,),
    **dict.fromkeys(("queries", "prefix_cache_gb", "attention"), (HERE,)),
}

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(
    epilog=EPILOG,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "allow_extra_args": True,
        "ignore_unknown_options": True,
    },
)
def search(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the demo model.")] = None,
    engine: Annotated[
        EngineName, typer.Option(help="What evaluates patterns. sglang: unknown options go to its server (--tp 8).")
    ] = "transformers",
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="sglang: a server in calibration mode instead of one's own; repeatable.", metavar="URL"),
    ] = None,
    calibration: Annotated[
        list[str] | None, typer.Option(help="Calibration source: file, folder, hub id; repeatable.", metavar="SOURCE")
    ] = None,
    evaluation: Annotated[
        list[str] | None,
        typer.Option(help="Held-out source; repeatable. Default: the calibration sources.", metavar="SOURCE"),
    ] = None,
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    dry_run: data_flags.DryRun = False,
    seq_len: run_flags.SeqLen = None,
    num_sequences: Annotated[int, typer.Option(help="Calibration sequences.", callback=bounded.sequences())] = 32,
    num_eval_sequences: Annotated[
        int | None,
        typer.Option(
            help=f"Held-out sequences. Default: 32, for the demo model {demo.SEQUENCES}.", callback=bounded.sequences()
        ),
    ] = None,
    retain: Annotated[
        str, typer.Option(help="Shares of layers that stay F, or D; the first is the file's default.")
    ] = "1/2,1/4,1/8",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy",  # typer 0.27 takes a metavar that is the name for the flag
            metavar="NAME",
            help="How to look for patterns, see below.",
        ),
    ] = DEFAULT_STRATEGY,
    candidates: Annotated[
        int,
        typer.Option(
            help="lazy: flips that a step evaluates at least. More: surer, dearer.", callback=bounded.within(1, 10_000)
        ),
    ] = 1,
    race: Annotated[
        bool,
        typer.Option(
            help="Look at a part of the sequences first, where the strategy does that. Never with greedy, exhaustive."
        ),
    ] = True,
    swaps: Annotated[
        int,
        typer.Option(
            help="Local search after the strategy: swaps to try a round; 0: none.", callback=bounded.within(0, 100_000)
        ),
    ] = 0,
    blocks: Annotated[
        int,
        typer.Option(
            help="greedy: search P blocks of layers in turn, up to P flips a round.", callback=bounded.within(1, 10_000)
        ),
    ] = 1,
    queries: Annotated[
        str,
        typer.Option(
            help="Let F layers select for 2, 4, 8, 16 or 64 neighbouring prompt queries at a time, such as 4,16; then"
            " --retain is a share of what indexers cost in prompts. Needs --reply."
        ),
    ] = "",
    price_context: Annotated[
        int,
        typer.Option(help="--queries: tokens of a prompt at which indexers are priced.", callback=bounded.tokens()),
    ] = PRICE_CONTEXT,
    decode_retain: Annotated[
        str | None,
        typer.Option(help="--queries: share of layers that are F at most: while decoding each runs its indexer."),
    ] = None,
    reply: Annotated[
        int | None,
        typer.Option(
            help="Only the last tokens of each sequence count, so many; before them is a prompt. The fewer they are,"
            " the more --num-sequences.",
            callback=bounded.tokens(2),
        ),
    ] = None,
    objective: Annotated[
        Objective,
        typer.Option(help="kl: divergence from the unpatterned model. nll: loss on the text, the paper's."),
    ] = "kl",
    output: Annotated[Path | None, typer.Option(help="Folder for the results. Default: indexcache-NAME.")] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Folder of the journal. Default: OUTPUT/work.")] = None,
    restart: run_flags.Restart = False,
    device: run_flags.Device = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. Default: float32; with sglang, the model's own.")
    ] = None,
    batch_size: run_flags.BatchSize = 1,
    prefix_cache_gb: Annotated[
        float | None,
        typer.Option(
            help="Host memory for layer outputs that patterns share; 0 turns it off. Default: 2, for the demo 1.7.",
            callback=bounded.within(0, 1e6),
        ),
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            help="auto, naive (transformers' own, dense) or kernels (this project's: no L x L tensor, CUDA only)."
            " auto: kernels on a CUDA device."
        ),
    ] = "auto",
    page_tokens: flags.PageTokens = None,
    pages: Annotated[str, typer.Option(help=f"{flags.PAGES}. Default: 64.")] = "",
    recent_pages: flags.RecentPages = None,
    sink_pages: flags.SinkPages = None,
    score: flags.Score = None,
    steps: Annotated[str, typer.Option(help=f"{flags.STEPS}.")] = "",
    seed: run_flags.Seed = 0,
    report: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print metrics.json to stdout, nothing else.")] = False,
) -> None:
    """Find which layers of a model can share what they attend to, and write a pattern file.

    Writes pattern.yaml, metrics.json and report.html. Without options it searches the demo model.
    """
    console = messages()
    with errors_in_one_line(console, "indexcache-search"):
        refuse_unread(context, NEEDS)
        if context.args and (engine != "sglang" or endpoint):
            raise SearchError(f"no such option: {context.args[0].partition('=')[0]}; see indexcache-search --help")
        from indexcache_search.run import Data, Files, Runtime, run, show, show_data
        from indexcache_search.settings import Settings

        if model is None and calibration is None:
            calibration, evaluation = list(demo.CALIBRATION), evaluation or list(demo.EVALUATION)
        if not calibration:
            raise SearchError("--calibration is missing, expected a file, folder or hub id with text like your traffic")
        retentions = tuple(dict.fromkeys(parse_retention(item) for item in retain.split(",")))
        settings = Settings(
            retain=retentions,
            strategy=strategy,
            blocks=blocks,
            flips=candidates,
            race=race,
            swaps=swaps,
            objective=objective,
            seed=seed,
            queries=_numbers("--queries", queries),
            price_context=price_context,
            decode_retain=None if decode_retain is None else parse_retention(decode_retain),
        )
        data = Data(
            tuple(calibration),
            tuple(evaluation or calibration),
            seq_len or (DEMO_LENGTH if model is None else None),
            num_sequences,
            num_eval_sequences or (demo.SEQUENCES if model is None else 32),
            reply,
            data_flags.row_options(chat_template, turns, skip_bad_rows),
        )
        folder = output or Path(f"indexcache-{_short_name(model)}")
        files = Files(folder, work_dir or folder / "work", restart, report)
        runtime = Runtime(
            engine,
            device,
            dtype,
            batch_size,
            (1.7 if model is None else 2.0) if prefix_cache_gb is None else prefix_cache_gb,
            attention,
            tuple(map(Address.of, endpoint or ())),
            tuple(context.args),
            flags.only(
                flags.selections_of(
                    pages=pages,
                    page_tokens=page_tokens,
                    recent_pages=recent_pages,
                    sink_pages=sink_pages,
                    score=score,
                    steps=steps,
                )
            ),
        )
        if dry_run:
            show_data(str(model or demo.MODEL), data, runtime, settings)
            return
        process.let_work_end()
        result = run(str(model or demo.MODEL), data, runtime, settings, files, console)
        if json_:
            sys.stdout.write(json.dumps(result.as_json(), indent=1) + "\n")
        else:
            show(result, model, files, results())


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """What `flag` lists."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isascii() and word.isdecimal() and len(word) < 5 for word in words):
        raise SearchError(f"{flag} is {text[:40]!r}, expected numbers like 4,16")
    return tuple(map(int, words))


def _short_name(model: str | None) -> str:
    if model is None:
        return "demo"
    return Path(model).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]
