"""The command line: indexcache-eval."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from indexcache_search import demo
from indexcache_search import selection_flags as flags
from indexcache_search.cli import FIRST_CHOICE, errors_in_one_line, near_of
from indexcache_search.errors import SearchError
from sglang_indexcache.address import Address
from sglang_indexcache.pattern import parse_retention
from sglang_indexcache.spec import GRAMMAR

EPILOG = """
Examples:

\b
  indexcache-eval
      The demo: patterns that indexcache-search found for it, beside uniform ones, on held-out text and recall tasks.

\b
  indexcache-eval --pattern indexcache-demo/pattern.yaml
      The demo with what you found.

\b
  indexcache-eval --model zai-org/GLM-5 --pattern deploy/glm5.yaml@1/4 --pattern published=FFSFSSS... \\
        --evaluation held_out.jsonl --tasks multi_key,variable_tracking --seq-len 8192 --device cuda --dtype bfloat16
      Two patterns of your model on your text and on generated tasks.

\b
  indexcache-eval --model zai-org/GLM-5 --endpoint http://baseline:30000 --endpoint http://shared:30000 \\
        --evaluation held_out.jsonl --tasks multi_key,multi_value,multi_query --chat --seq-len 32768
      Is what is served as good as the baseline server, the first one? --model is read for its tokenizer only.

\b
  indexcache-eval --model HuggingFaceTB/SmolLM2-135M-Instruct --attention key_delta --threshold 0.6,1.0 \\
        --evaluation notes.txt --seq-len 512
      What keys as thresholded differences (DeltaLLM) save on a dense model, and lose, beside what saves as much.

\b
Exit codes: 0 done, 1 a pattern or server is worse than --max-increase allows, 2 bad input, 70 a bug, 130 interrupted.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def evaluate(
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
    tasks: Annotated[
        str, typer.Option(help="Generated tasks: multi_key,multi_value,multi_query,variable_tracking,common_words.")
    ] = "",
    pages: Annotated[
        str,
        typer.Option(help=f"{flags.PAGES}, in the place of the file's; 16,64,256: each."),
    ] = "",
    page_tokens: Annotated[int | None, typer.Option(help=flags.PAGE_TOKENS)] = None,
    recent_pages: Annotated[int | None, typer.Option(help=flags.RECENT_PAGES)] = None,
    sink_pages: Annotated[int | None, typer.Option(help=flags.SINK_PAGES)] = None,
    score: Annotated[str | None, typer.Option(help=flags.SCORE)] = None,
    steps: Annotated[str, typer.Option(help=f"{flags.STEPS}; none,ema:0.9: each.")] = "",
    samples: Annotated[int, typer.Option(help="Samples of each task.", min=2)] = 16,
    haystack: Annotated[str, typer.Option(help="Source of the text around a task's needles.")] = "demo:text",
    reply: Annotated[
        int | None,
        typer.Option(
            help="Only the last tokens of each sequence count, so many; what stands before them is a prompt. Patterns"
            " that select for several prompt queries at a time (+6q16) need it.",
            min=2,
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask tasks through the chat template.")] = False,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens a sequence; more than {FIRST_CHOICE}. Default: 4 times that.", min=1)
    ] = None,
    num_sequences: Annotated[
        int | None,
        typer.Option(help="Held-out sequences, of all sources together. Default: 144, for the demo model 96.", min=1),
    ] = None,
    max_increase: Annotated[
        float | None,
        typer.Option(help="Exit with 1 if a loss rises by more than this and two standard errors of the rise."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for eval.json and eval.html.")] = Path("indexcache-eval"),
    restart: Annotated[bool, typer.Option("--restart", help="Discard the journal and start afresh.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, typer.Option(help="Sequences a forward.", min=1)] = 1,
    prefix_cache_gb: Annotated[
        float,
        typer.Option(help="Host memory for layer outputs; of dense models as much again for keys of prompts.", min=0),
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
        typer.Option(help="key_delta: keys that stay exact near a prompt's query, as a share. Default: 0.05."),
    ] = None,
    max_window: Annotated[int | None, typer.Option(help="key_delta: those keys at most.", min=1)] = None,
    recent_keys: Annotated[
        int | None, typer.Option(help="key_delta: last keys that stay exact for a reply's query. Default: 4.", min=1)
    ] = None,
    rivals: Annotated[
        bool, typer.Option(help="key_delta: compare with windows, blocks and few bits, at equal savings.")
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print eval.json to stdout, nothing else.")] = False,
) -> None:
    """Compare patterns, or servers, on data that nobody searched on.

    Differences are paired: everything sees the same sequences.
    """
    console = Console(stderr=True, highlight=False)
    with errors_in_one_line(console, "indexcache-eval"):
        from indexcache_search.compare.result import rises
        from indexcache_search.compare.run import Candidates, Data, Runtime, run, show

        is_demo = model is None
        near = near_of(window, max_window, recent_keys)
        if attention != "key_delta" and (near or threshold is not None):
            raise SearchError("--threshold, --window, --max-window and --recent-keys need --attention key_delta")
        if max_increase is not None and not math.isfinite(max_increase):
            raise SearchError(f"--max-increase is {max_increase}, expected a number")
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
            sequences=num_sequences or (96 if is_demo else 144),
            samples=samples,
            chat=chat,
            reply=reply,
        )
        runtime = Runtime(
            device=device, dtype=dtype, batch_size=batch_size, prefix_cache_gb=prefix_cache_gb, attention=attention
        )
        if attention == "key_delta":
            from indexcache_search.compare import keys

            if is_demo or endpoint:
                raise SearchError("--attention key_delta needs the --model of a dense model, and no --endpoint")
            asked = keys.KeyCandidates(
                asked=keys.asked_for(threshold or "0.2,0.6,1.0", near),
                patterns=tuple(pattern or ()),
                selections=selections,
                rivals=rivals,
            )
            result = keys.run(str(model), asked, data, runtime, output, restart, console)
        else:
            result = run(model or str(demo.MODEL), candidates, data, runtime, output, restart, console)
    if json_:
        sys.stdout.write(json.dumps(result.as_json(), indent=1) + "\n")
    else:
        show(result, output, Console(highlight=False, width=None if sys.stdout.isatty() else 200))
    if max_increase is not None and rises(result.held_out.rows) > max_increase:
        raise typer.Exit(1)
