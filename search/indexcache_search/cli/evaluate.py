"""The command line: indexcache-eval."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from indexcache_search import demo
from indexcache_search.cli import options
from indexcache_search.cli.bounded import SEQUENCES, Bounds
from indexcache_search.cli.command import Config, OptionNeed, Version, application, number, option, running
from indexcache_search.cli.engines import EngineChoice
from indexcache_search.cli.extra import with_options
from indexcache_search.cli.help import MORE
from indexcache_search.console import results, warn
from indexcache_search.data import COMPARED
from indexcache_search.eval.extra import ExtraComparison, ExtraJob, comparisons
from indexcache_search.strategies import DEFAULT_RETAIN
from sglang_indexcache import process
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.http.address import Address
from sglang_indexcache.pattern_file.file import split_retention
from sglang_indexcache.pattern_file.pattern_name import spells_letters, split_name

EXTRAS = comparisons()
_EXAMPLES = "".join(f"{extra.example}\n" for extra in EXTRAS.values())
_GATES = " or ".join(("--max-increase", *(extra.gate for extra in EXTRAS.values() if extra.gate)))

EPILOG = f"""
Examples:

\b
  indexcache-eval
      The demo: patterns that indexcache-search found for it, beside uniform ones, on held-out text and recall tasks.

\b
  indexcache-eval --pattern indexcache-demo/pattern.yaml
      The demo with what you found.

\b
  indexcache-eval --model ./my-dsa-model --pattern deploy/mine/pattern.yaml@1/4 --pattern even=uniform@1/4 \\
        --evaluation held_out.jsonl --tasks multi_key,variable_tracking --seq-len 8192 --device cuda --dtype bfloat16
      Two patterns of a model that one GPU holds, on your text and on generated tasks.

\b
  indexcache-eval --model zai-org/GLM-5-FP8 --endpoint http://baseline:30000 --endpoint http://shared:30000 \\
        --evaluation held_out.jsonl --tasks multi_key,multi_value,multi_query:chat=yes --seq-len 32768 \\
        --speed 8192,32768,131072 --concurrency 8
      Is what is served as good as the baseline server, the first one, and how much faster? --model is read for its
      tokenizer and configuration only.

{_EXAMPLES}{MORE}
{exit_codes(f"a pattern or server is worse than {_GATES} allows, or a loss was not finite")}
"""


def _is_open(text: str) -> bool:
    """Return true if `text` names a file without selecting one of its retentions."""
    name = split_name(text)[1]
    return split_retention(name)[1] is None and not spells_letters(name)


def _compares_open_files(given: Any) -> bool:
    return any(map(_is_open, given["pattern"] or (demo.PATTERNS if given["model"] is None else ())))


def _reads_sources(given: Any) -> bool:
    return bool(given["evaluation"]) or (given["model"] is None and not given["tasks"])


def _compares(given: Any) -> bool:
    """Return whether loss and speed are compared: always, but for a run that has comparisons of extensions alone."""
    return all(given[name] is None for name in EXTRAS) or bool(given["evaluation"] or given["tasks"])


def _given(flag: str) -> OptionNeed:
    name = flag.removeprefix("--").replace("-", "_")
    return OptionNeed(flag, lambda given: bool(given[name]))


HERE = OptionNeed("patterns of a model that runs here, without --endpoint", lambda given: not given["endpoint"])
COMPARES = OptionNeed("--evaluation or --tasks beside " + " or ".join(f"--{name}" for name in EXTRAS), _compares)
NEEDS = {
    **dict.fromkeys(("rows", "dry_run", "reply", "seq_len"), (COMPARES,)),
    **dict.fromkeys(("pattern", "selection", "uniform", "restart", "engine", "device", "dtype", "batch_size"), (HERE,)),
    "retain": (HERE, OptionNeed("a --pattern file without @ and a retention", _compares_open_files)),
    **{name: tuple(map(_given, extra.needs)) for name, extra in EXTRAS.items()},
    "num_sequences": (
        COMPARES,
        OptionNeed("--evaluation", _reads_sources),
    ),
    "max_increase": (COMPARES,),
    "speed": (
        COMPARES,
        OptionNeed(
            "--endpoint for output_tokens and turns",
            lambda given: given["endpoint"] or not {"output_tokens", "turns"} & given["speed"].given().keys(),
        ),
        OptionNeed(
            "patterns, without --endpoint, for prices", lambda given: not (given["endpoint"] and given["speed"].prices)
        ),
    ),
    "concurrency": (
        OptionNeed("--speed", lambda given: given["speed"] is not None),
        _given("--endpoint"),
    ),
}


@with_options(EXTRAS)
def evaluate(
    context: typer.Context,
    *,
    model: options.Model = None,
    pattern: options.Patterns = None,
    selection: options.Selections = None,
    retain: options.Retain = DEFAULT_RETAIN,
    evaluation: options.HeldOut = None,
    rows: options.Rows = None,
    dry_run: options.DryRun = False,
    tasks: options.Tasks = None,
    reply: options.Reply = None,
    seq_len: options.SeqLen = None,
    num_sequences: Annotated[
        int | None,
        number(f"Sequences, of all sources together. Default: {COMPARED}, for the demo {demo.SEQUENCES}.", SEQUENCES),
    ] = None,
    uniform: Annotated[bool, option("Compare with uniform patterns at all phases.")] = True,
    max_increase: Annotated[
        float | None,
        number("Exit with 1 unless every loss is shown to rise by at most this (95 %).", Bounds(-1e6, 1e6)),
    ] = None,
    speed: options.Speed = None,
    concurrency: Annotated[
        int | None, number("Time this number of requests at once as well.", Bounds(2, 1024, "a thread each"))
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        option("OpenAI-compatible server to compare; repeatable, the first is the baseline.", metavar="URL"),
    ] = None,
    engine: options.Engine = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    batch_size: options.BatchSize = 1,
    output: Annotated[Path, option("Folder for eval.json and eval.html.")] = Path("indexcache-eval"),
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
    **asked: Any,
) -> None:
    """Compare patterns, or servers, on data that nobody searched on; without options those of the demo.

    Differences are paired: everything sees the same sequences.
    """
    chosen, is_demo = engine or EngineChoice(), model is None
    with running(context, NEEDS) as console:
        options.check_runs_here(device, dtype)
        addresses, row_options = tuple(map(Address.of, endpoint or ())), options.row_options(rows)
        worse, compares = False, _compares(context.params)
        around = {"model": model or str(demo.MODEL), "endpoints": addresses, "output": output, "console": console}
        extras = _extra_jobs(asked, compares, **around)
        for extra, extra_job in () if dry_run else extras:  # before the comparison, which takes long
            extra.check(extra_job)
        if compares:
            from indexcache_search.data.packing import Wish
            from indexcache_search.eval.candidates import Candidates
            from indexcache_search.eval.held_out import ComparisonData
            from indexcache_search.eval.job import ComparisonJob
            from indexcache_search.eval.run import run, show
            from indexcache_search.eval.speeds import SpeedOptions
            from indexcache_search.eval.verdict import beyond

            candidates = Candidates(
                patterns=tuple(pattern or (demo.PATTERNS if is_demo and not endpoint else ())),
                retentions=options.retentions(retain),
                uniform=uniform,
                endpoints=addresses,
                selections=options.selections_of(selection),
            )
            generated = {} if tasks is None else {**vars(tasks)}
            data = ComparisonData(
                sources=tuple(evaluation or (demo.EVALUATION if is_demo and not tasks else ())),
                tasks=generated.pop("names", ()),
                seq_len=seq_len or (512 if is_demo else None),
                sequences=num_sequences or Wish(demo.SEQUENCES if is_demo else COMPARED),
                reply=reply,
                rows=row_options,
                only_shown=dry_run,
                **generated,
            )
            speeds = None
            if speed is not None:
                speeds = SpeedOptions(concurrency=concurrency or 1, **speed.given())
            process.let_work_end()
            job = ComparisonJob(
                model=model or str(demo.MODEL),
                candidates=candidates,
                data=data,
                output=output,
                run=chosen.run(options.ENGINE_DEFAULTS, device=device, dtype=dtype, batch_size=batch_size),
                restart=restart,
                speed=speeds,
                console=console,
            )
            result = run(job)
            if result is None:
                return
            show(result, output, results())
            if max_increase is not None:
                failed = beyond(result.held_out.rows, max_increase)
                worse = bool(failed)
                for line in failed:
                    warn(console, f"--max-increase {max_increase:g}: {line}")
        for extra, extra_job in extras:
            process.let_work_end()
            worse |= extra.run(extra_job)
        if worse:
            raise typer.Exit(1)


def _extra_jobs(asked: Mapping[str, Any], beside: bool, **around: Any) -> list[tuple[ExtraComparison, ExtraJob]]:
    """Return the comparisons of extensions that are asked for; all but the first find results `beside` their own."""
    found: list[tuple[ExtraComparison, ExtraJob]] = []
    for name, extra in EXTRAS.items():
        if asked[name] is not None:
            found.append((extra, ExtraJob(settings=asked[name], beside=beside or bool(found), **around)))
    return found


app = application({"indexcache-eval": evaluate}, EPILOG)
