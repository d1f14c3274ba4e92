"""The command line: indexcache-eval."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from indexcache_search import demo
from indexcache_search.cli import errors_in_one_line
from indexcache_search.data.sketch import Sketch
from indexcache_search.errors import SearchError
from indexcache_search.line import NAMED, Line
from indexcache_search.results import ComparisonResult
from sglang_indexcache import DsaModel
from sglang_indexcache.files import write_atomically
from sglang_indexcache.pattern import full_layer_count, parse_retention
from sglang_indexcache.spec import GRAMMAR, PatternSpec, split_name

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
Exit codes: 0 done, 1 a pattern or server is worse than --max-increase allows, 2 bad input, 70 a bug, 130 interrupted.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def evaluate(
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a DSA model. Default: the demo model.")] = None,
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
    samples: Annotated[int, typer.Option(help="Samples of each task.", min=2)] = 16,
    haystack: Annotated[str, typer.Option(help="Source of the text around a task's needles.")] = "demo:text",
    chat: Annotated[bool, typer.Option("--chat", help="Ask tasks through the chat template.")] = False,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a sequence; must exceed index_topk. Default: 4 x index_topk.", min=1)
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
    attention: Annotated[str, typer.Option(help="auto, naive or kernels, see indexcache-search --help.")] = "auto",
    json_: Annotated[bool, typer.Option("--json", help="Print eval.json to stdout, nothing else.")] = False,
) -> None:
    """Compare patterns, or servers, on data that nobody searched on.

    Differences are paired: everything sees the same sequences.
    """
    from indexcache_search.compare import held_out, measure, result
    from indexcache_search.data.packing import TokenReader
    from indexcache_search.hf.loading import check_seq_len, describe_model, load_tokenizer, read_config, set_quiet

    console = Console(stderr=True, highlight=False)
    with errors_in_one_line(console, "indexcache-eval"):
        if model is None and not endpoint:
            pattern = pattern or list(demo.PATTERNS)
        if bool(pattern) == bool(endpoint):
            raise SearchError("expected either --pattern or --endpoint")
        if max_increase is not None and not math.isfinite(max_increase):
            raise SearchError(f"--max-increase is {max_increase}, expected a number")
        if endpoint and len(endpoint) < 2:
            raise SearchError("--endpoint: found one, expected a baseline server and one to compare it with")
        name = model or str(demo.MODEL)
        set_quiet()
        description, config = describe_model(name), read_config(name)
        retentions = [parse_retention(item) for item in retain.split(",")]
        named = named_patterns(pattern or [], retentions, description, uniform)
        length = seq_len or (512 if model is None else 4 * description.index_topk)
        check_seq_len(length, config)
        data = held_out.build(
            TokenReader(lambda: load_tokenizer(name), config.vocab_size, length),
            lambda: load_tokenizer(name),
            description,
            evaluation or (list(demo.EVALUATION) if model is None and not tasks else []),
            [task for task in tasks.split(",") if task],
            haystack,
            seq_len=length,
            sequences=num_sequences or (96 if model is None else 144),
            samples=samples,
            chat=chat,
            calibrated=calibrated_on(pattern or []),
        )
        if data.left_out:
            console.print(f"left out {data.left_out} documents that a pattern was calibrated on", style="yellow")
        count = data.data.num_sequences
        with Progress(console=console, disable=not console.is_terminal) as progress:
            if endpoint:
                bar = progress.add_task("servers", total=len(endpoint) * count)
                lines = measure.servers(endpoint, data, lambda done: progress.advance(bar, done))
                engine = ", ".join(endpoint)
            else:
                distinct = len({description.native, *(line.pattern for line in named)})
                bar = progress.add_task("patterns", total=2 * distinct * count)
                runtime = {"device": device, "dtype": dtype, "batch_size": batch_size, "attention": attention}
                lines, engine = _patterns(
                    name, runtime, named, data, output, restart, lambda done: progress.advance(bar, done)
                )
        found = result.collect(
            lines, data, description.index_topk, model=description.name, engine=engine, seq_len=length
        )
        _write(found, output)
    if json_:
        sys.stdout.write(json.dumps(found.as_json(), indent=1) + "\n")
    else:
        _show(found, output)
    if max_increase is not None and result.rises(found.held_out.rows) > max_increase:
        raise typer.Exit(1)


def named_patterns(specs: list[str], retentions: list[Fraction], model: DsaModel, uniform: bool) -> list[Line]:
    """The lines that were asked for.

    Raises:
        IndexCacheError: if a file can't be read, was made for another model, or a pattern does not fit this one.
    """
    found: list[Line] = []
    for text in specs:
        name, rest = split_name(text)
        spec = PatternSpec.read(rest)
        found += [Line(NAMED, name or spec.label, *item) for item in spec.by_retention(model, retentions)]
    if uniform:
        from indexcache_search.line import uniform_lines

        for kept in dict.fromkeys(line.retention for line in found if line.retention is not None):
            if full_layer_count(model.num_layers, kept) < model.num_layers:
                found += uniform_lines(model.native, kept)
    return found


def calibrated_on(specs: list[str]) -> list[Sketch]:
    """What the files among `specs` say they were calibrated on; files of earlier versions say nothing.

    Raises:
        IndexCacheError: if a file can't be read.
    """
    found = []
    for text in specs:
        file = PatternSpec.read(split_name(text)[1]).file
        if file is None or file.calibration is None or file.calibration.sketch is None:
            continue
        try:
            found.append(Sketch.decode(file.calibration.sketch))
        except ValueError:
            raise SearchError(f"{text}: calibration.sketch can't be read, expected what the search wrote") from None
    return found


def _patterns(
    name: str, runtime: Mapping[str, Any], named: Any, data: Any, output: Path, restart: bool, done: Any
) -> tuple[Any, str]:
    from indexcache_search.compare import measure
    from indexcache_search.engines.transformers import TransformersEngine
    from indexcache_search.evaluator import Evaluator
    from indexcache_search.journal import Journal
    from indexcache_search.search import engine_identity, today

    engine = TransformersEngine.load(name, prefix_cache_gb=1.0, **runtime)
    identity = {**engine_identity(engine), "held-out": data.data.sha256}
    with Journal(output / "work", identity, today(), restart) as journal:
        losses = Evaluator(engine, data.data, "nll", journal, "nll", lambda item: done(len(item.rows)))
        divergences = Evaluator(engine, data.data, "kl", journal, "kl", losses.on_evaluation)
        lines = measure.patterns(losses, divergences, named, data)
    return lines, f"{engine.name}, {', '.join(f'{key} {value}' for key, value in engine.settings.items())}"


def _write(found: ComparisonResult, output: Path) -> None:
    from indexcache_search.compare.result import render

    write_atomically(output / "eval.json", json.dumps(found.as_json(), indent=1) + "\n")
    write_atomically(output / "eval.html", render(found))


def _show(found: ComparisonResult, output: Path) -> None:
    from indexcache_search import tables
    from indexcache_search.compare.result import task_table

    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(tables.terminal_table(found.held_out))
    answers = task_table(found)
    if answers is not None:
        out.print(answers)
    for line in found.findings:
        out.print(line, soft_wrap=True)
    out.print(f"Wrote {output / 'eval.json'}, {output / 'eval.html'}", soft_wrap=True)
