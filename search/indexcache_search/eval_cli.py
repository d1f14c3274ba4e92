"""The command line: indexcache-eval."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from indexcache_search import bounded, data_flags, demo, run_flags
from indexcache_search import selection_flags as flags
from indexcache_search.needs import Need, Needs, refuse_unread
from indexcache_search.terminal import errors_in_one_line, messages, results
from sglang_indexcache import process
from sglang_indexcache.address import Address
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.pattern import parse_retention
from sglang_indexcache.pattern_file import split_retention
from sglang_indexcache.spec import GRAMMAR, spells_letters, split_name

EPILOG = f"""
Examples:

\b
  indexcache-eval
      The demo: patterns that indexcache-search found for it, beside uniform ones, on held-out text and recall tasks.

\b
  indexcache-eval --pattern indexcache-demo/pattern.yaml
      The demo with what you found.

\b
  indexcache-eval --model ./my-dsa-model --pattern deploy/mine.yaml@1/4 --pattern published=FFSFSSS... \\
        --evaluation held_out.jsonl --tasks multi_key,variable_tracking --seq-len 8192 --device cuda --dtype bfloat16
      Two patterns of a model that one GPU holds, on your text and on generated tasks.

\b
  indexcache-eval --model zai-org/GLM-5 --endpoint http://baseline:30000 --endpoint http://shared:30000 \\
        --evaluation held_out.jsonl --tasks multi_key,multi_value,multi_query --chat --seq-len 32768
      Is what is served as good as the baseline server, the first one? --model is read for its tokenizer only.

\b
{exit_codes("a pattern or server is worse than --max-increase allows, or a loss was not finite")}
"""

HERE = Need("patterns of a model that runs here, without --endpoint", lambda given: not given["endpoint"])
OPEN = Need(
    "a --pattern file without @ and a retention",
    lambda given: any(map(_is_open, given["pattern"] or (demo.PATTERNS if given["model"] is None else ()))),
)
TASKS = Need("--tasks", lambda given: bool(given["tasks"]))
SOURCES = Need(
    "--evaluation", lambda given: bool(given["evaluation"]) or (given["model"] is None and not given["tasks"])
)
WITH_RESULTS = Need("a run without --dry-run", lambda given: not given["dry_run"])
NEEDS: Needs = {
    **dict.fromkeys(("model", "endpoint", "evaluation", "tasks", "reply", "seq_len", "output"), ()),
    **dict.fromkeys(("max_increase", "json_"), (WITH_RESULTS,)),
    **dict.fromkeys(("chat_template", "turns", "skip_bad_rows", "dry_run"), ()),
    **dict.fromkeys(("pages", "page_tokens", "recent_pages", "sink_pages", "score", "steps"), (HERE,)),
    **dict.fromkeys(("pattern", "restart", "device", "dtype", "batch_size", "prefix_cache_gb", "attention"), (HERE,)),
    **dict.fromkeys(("samples", "haystack", "chat"), (TASKS,)),
    "retain": (HERE, OPEN),
    "uniform": (HERE,),
    "num_sequences": (SOURCES,),
}


def _is_open(text: str) -> bool:
    """Whether `text` names a file, and none of the retentions in it."""
    name = split_name(text)[1]
    return split_retention(name)[1] is None and not spells_letters(name)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def evaluate(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the demo model.")] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",  # typer 0.27 takes a metavar that is the name for the flag
            help=f"{GRAMMAR}, with NAME= before it for the table; repeatable. Default: the demo's, for the demo model.",
            metavar="PATTERN",
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="OpenAI-compatible server; repeatable, the first is the baseline.", metavar="URL"),
    ] = None,
    retain: Annotated[str, typer.Option(help="Retentions of files that name none.")] = "1/2,1/4,1/8",
    uniform: Annotated[bool, typer.Option(help="Compare with uniform patterns at all phases.")] = True,
    evaluation: Annotated[list[str] | None, typer.Option(help="Held-out source; repeatable.", metavar="SOURCE")] = None,
    chat_template: data_flags.ChatTemplate = None,
    turns: data_flags.TurnsFlag = "auto",
    skip_bad_rows: data_flags.SkipBadRows = 0,
    dry_run: data_flags.DryRun = False,
    tasks: Annotated[
        str, typer.Option(help="Generated tasks: multi_key,multi_value,multi_query,variable_tracking,common_words.")
    ] = "",
    pages: flags.PagesEach = "",
    page_tokens: flags.PageTokens = None,
    recent_pages: flags.RecentPages = None,
    sink_pages: flags.SinkPages = None,
    score: flags.Score = None,
    steps: flags.StepsEach = "",
    samples: Annotated[int, typer.Option(help="Samples of each task.", callback=bounded.within(2, 10_000))] = 16,
    haystack: Annotated[str, typer.Option(help="Source of the text around a task's needles.")] = "demo:text",
    reply: Annotated[
        int | None,
        typer.Option(
            help="Only the last tokens of each sequence count, so many; what stands before them is a prompt. Patterns"
            " that select for several prompt queries at a time (+6q16) need it.",
            callback=bounded.tokens(2),
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask tasks through the chat template.")] = False,
    seq_len: run_flags.SeqLen = None,
    num_sequences: Annotated[
        int | None,
        typer.Option(
            help=f"Held-out sequences, of all sources together. Default: 144, for the demo model {demo.SEQUENCES}.",
            callback=bounded.sequences(),
        ),
    ] = None,
    max_increase: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if a loss rises by more than this and two standard errors of the rise.",
            callback=bounded.within(-1e6, 1e6),
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for eval.json and eval.html.")] = Path("indexcache-eval"),
    restart: run_flags.Restart = False,
    device: run_flags.Device = "auto",
    dtype: run_flags.Dtype = "float32",
    batch_size: run_flags.BatchSize = 1,
    prefix_cache_gb: Annotated[
        float,
        typer.Option(
            help="Host memory for layer outputs; of dense models as much again for keys of prompts.",
            callback=bounded.within(0, 1e6),
        ),
    ] = 1.0,
    attention: Annotated[str, typer.Option(help="auto, naive or kernels, see indexcache-search --help.")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print eval.json to stdout, nothing else.")] = False,
) -> None:
    """Compare patterns, or servers, on data that nobody searched on.

    Differences are paired: everything sees the same sequences.
    """
    console = messages()
    with errors_in_one_line(console, "indexcache-eval"):
        refuse_unread(context, NEEDS)
        from indexcache_search.compare.result import rises
        from indexcache_search.compare.run import Candidates, Data, Runtime, run, show

        is_demo = model is None
        selections = flags.selections_of(
            pages=pages,
            page_tokens=page_tokens,
            recent_pages=recent_pages,
            sink_pages=sink_pages,
            score=score,
            steps=steps,
        )
        candidates = Candidates(
            patterns=tuple(pattern or (demo.PATTERNS if is_demo and not endpoint else ())),
            retentions=tuple(parse_retention(item) for item in retain.split(",")),
            uniform=uniform,
            endpoints=tuple(map(Address.of, endpoint or ())),
            selections=selections,
        )
        data = Data(
            sources=tuple(evaluation or (demo.EVALUATION if is_demo and not tasks else ())),
            tasks=tuple(task for task in tasks.split(",") if task),
            haystack=haystack,
            seq_len=seq_len or (512 if is_demo else None),
            sequences=num_sequences or (demo.SEQUENCES if is_demo else 144),
            samples=samples,
            chat=chat,
            reply=reply,
            rows=data_flags.row_options(chat_template, turns, skip_bad_rows),
            only_shown=dry_run,
        )
        runtime = Runtime(
            device=device, dtype=dtype, batch_size=batch_size, prefix_cache_gb=prefix_cache_gb, attention=attention
        )
        process.let_work_end()
        result = run(model or str(demo.MODEL), candidates, data, runtime, output, restart, console)
        if result is None:
            return
        if json_:
            sys.stdout.write(json.dumps(result.as_json(), indent=1) + "\n")
        else:
            show(result, output, results())
        if max_increase is not None and rises(result.held_out.rows) > max_increase:
            raise typer.Exit(1)
