"""The command line: indexcache-eval."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from indexcache_search import bounded, data_flags, demo
from indexcache_search import selection_flags as flags
from indexcache_search.cli import FIRST_CHOICE, near_of
from indexcache_search.errors import SearchError
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
  indexcache-eval --model HuggingFaceTB/SmolLM2-135M-Instruct --attention key_delta --threshold 0.6,1.0 \\
        --evaluation notes.txt --seq-len 512
      What keys as thresholded differences (DeltaLLM) save on a dense model, and lose, beside what saves as much.

\b
{exit_codes("a pattern or server is worse than --max-increase allows, or a loss was not finite")}
"""

KEYS = Need("--attention key_delta", lambda given: given["attention"] == "key_delta")
PLAIN = Need("patterns alone, without --attention key_delta", lambda given: given["attention"] != "key_delta")
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
    **dict.fromkeys(("model", "evaluation", "tasks", "reply", "seq_len", "output"), ()),
    **dict.fromkeys(("max_increase", "json_"), (WITH_RESULTS,)),
    **dict.fromkeys(("chat_template", "turns", "skip_bad_rows", "dry_run"), ()),
    **dict.fromkeys(("pages", "page_tokens", "recent_pages", "sink_pages", "score", "steps"), (HERE,)),
    **dict.fromkeys(("pattern", "restart", "device", "dtype", "batch_size", "prefix_cache_gb", "attention"), (HERE,)),
    **dict.fromkeys(("samples", "haystack", "chat"), (TASKS,)),
    **dict.fromkeys(("threshold", "window", "max_window", "recent_keys", "rivals"), (KEYS,)),
    "endpoint": (PLAIN,),
    "retain": (HERE, OPEN),
    "uniform": (HERE, PLAIN),
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
    pages: Annotated[
        str,
        typer.Option(help=f"{flags.PAGES}, in the place of the file's; 16,64,256: each."),
    ] = "",
    page_tokens: Annotated[int | None, typer.Option(help=flags.PAGE_TOKENS, callback=bounded.tokens())] = None,
    recent_pages: Annotated[int | None, typer.Option(help=flags.RECENT_PAGES, callback=bounded.tokens(0))] = None,
    sink_pages: Annotated[int | None, typer.Option(help=flags.SINK_PAGES, callback=bounded.tokens(0))] = None,
    score: Annotated[str | None, typer.Option(help=flags.SCORE)] = None,
    steps: Annotated[str, typer.Option(help=f"{flags.STEPS}; none,ema:0.9: each.")] = "",
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
    seq_len: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens a sequence; more than {FIRST_CHOICE}. Default: 4 times that.", callback=bounded.tokens()
        ),
    ] = None,
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
    restart: Annotated[bool, typer.Option("--restart", help="Discard the journal and start afresh.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, typer.Option(help="Sequences a forward.", callback=bounded.batch())] = 1,
    prefix_cache_gb: Annotated[
        float,
        typer.Option(
            help="Host memory for layer outputs; of dense models as much again for keys of prompts.",
            callback=bounded.within(0, 1e6),
        ),
    ] = 1.0,
    attention: Annotated[
        str,
        typer.Option(help="auto, naive or kernels, see indexcache-search --help; or key_delta, see the last example."),
    ] = "auto",
    threshold: Annotated[
        str | None,
        typer.Option(
            help="key_delta: thresholds, each for all layers, or files of indexcache-search --method key_delta."
            " Default: 0.2,0.6,1.0."
        ),
    ] = None,
    window: Annotated[
        float | None,
        typer.Option(
            help="key_delta: keys that stay exact near a prompt's query, as a share. Default: 0.05.",
            callback=bounded.within(0, 1),
        ),
    ] = None,
    max_window: Annotated[
        int | None, typer.Option(help="key_delta: those keys at most.", callback=bounded.tokens())
    ] = None,
    recent_keys: Annotated[
        int | None,
        typer.Option(
            help="key_delta: last keys that stay exact for a reply's query. Default: 4.", callback=bounded.tokens()
        ),
    ] = None,
    rivals: Annotated[
        bool, typer.Option(help="key_delta: compare with windows, blocks and few bits, at equal savings.")
    ] = True,
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
        near = near_of(window, max_window, recent_keys)
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
        if attention == "key_delta":
            from indexcache_search.lab.key_delta import compare as keys

            if is_demo:
                raise SearchError("--attention key_delta needs the --model of a dense model")
            asked = keys.KeyCandidates(
                asked=keys.asked_for(threshold or "0.2,0.6,1.0", near),
                patterns=candidates.patterns,
                retentions=candidates.retentions,
                selections=selections,
                rivals=rivals,
            )
            result = keys.run(str(model), asked, data, runtime, output, restart, console)
        else:
            result = run(model or str(demo.MODEL), candidates, data, runtime, output, restart, console)
        if result is None:
            return
        if json_:
            sys.stdout.write(json.dumps(result.as_json(), indent=1) + "\n")
        else:
            show(result, output, results())
        if max_increase is not None and rises(result.held_out.rows) > max_increase:
            raise typer.Exit(1)
