"""The command line: indexcache-search."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from indexcache_search import demo
from indexcache_search.errors import NonFiniteLossError, SearchError
from indexcache_search.journal import Journal
from indexcache_search.progress import SearchProgress
from sglang_indexcache import IndexCacheError
from sglang_indexcache.pattern import parse_retention
from sglang_indexcache.pattern_file import write_atomically

if TYPE_CHECKING:
    from indexcache_search.engines.base import Engine
    from indexcache_search.search import Settings
    from indexcache_search.strategies.greedy import Step
    from indexcache_search.tokens import TokenSet

OVERLAP_ROWS = 64  # queries a sequence for the overlap matrix
DEMO_SEQ_LEN = 512


class EngineName(StrEnum):
    TRANSFORMERS = "transformers"


class StrategyName(StrEnum):
    GREEDY = "greedy"
    UNIFORM = "uniform"
    SIMILARITY = "similarity"


class ObjectiveName(StrEnum):
    NLL = "nll"
    KL = "kl"


EPILOG = """
Examples:

\b
  indexcache-search
      The demo: a small DSA model and its data, both in the package.

\b
  indexcache-search --model zai-org/GLM-5 --calibration sft.jsonl --seq-len 8192 --device cuda --dtype bfloat16
      Your model, your text. Rows hold `text`, `messages`, or `input_ids` with an optional `loss_mask`.

\b
  indexcache-search --calibration long.parquet --calibration owner/dataset:subset --evaluation held_out.jsonl ...
      Several sources count equally. Without --evaluation, held-out text is set aside from the calibration sources.

\b
  indexcache-search ... --strategy similarity
      The paper's baselines; evaluations are shared with other strategies in the same --work-dir.

Run the same command again to go on after a kill, a crash or Ctrl-C.

\b
Exit codes: 0 done, 1 the run failed (a loss was not finite), 2 bad input, 130 interrupted.
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def search(
    model: Annotated[str | None, typer.Option(help="Folder or hub id of a DSA model. Default: the demo model.")] = None,
    engine: Annotated[EngineName, typer.Option(help="What evaluates patterns.")] = EngineName.TRANSFORMERS,
    calibration: Annotated[
        list[str] | None, typer.Option(help="Calibration source: file, folder, hub id; repeatable.")
    ] = None,
    evaluation: Annotated[
        list[str] | None, typer.Option(help="Held-out source; repeatable. Default: the calibration sources.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens a sequence; must exceed index_topk. Default: 4 x index_topk.", min=1)
    ] = None,
    num_sequences: Annotated[int, typer.Option(help="Calibration sequences.", min=1)] = 4,
    num_eval_sequences: Annotated[int, typer.Option(help="Held-out sequences.", min=1)] = 12,
    retain: Annotated[
        str, typer.Option(help="Shares of indexers to keep; the first is the file's default.")
    ] = "1/2,1/4,1/8",
    strategy: Annotated[StrategyName, typer.Option(help="greedy is the paper's Algorithm 1.")] = StrategyName.GREEDY,
    blocks: Annotated[int, typer.Option(help="Search P blocks of layers in turn, up to P flips a round.", min=1)] = 1,
    objective: Annotated[
        ObjectiveName, typer.Option(help="nll: loss on the text. kl: divergence from the unpatterned model.")
    ] = ObjectiveName.NLL,
    output: Annotated[Path | None, typer.Option(help="Folder for the results. Default: indexcache-NAME.")] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Folder of the journal. Default: OUTPUT/work.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the journal and start afresh.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, typer.Option(help="Sequences a forward.", min=1)] = 1,
    prefix_cache_gb: Annotated[
        float, typer.Option(help="Device memory for layer outputs that candidates share; 0 turns it off.", min=0)
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Order of the calibration documents.")] = 0,
    report: Annotated[bool, typer.Option(help="Write report.html.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print metrics.json to stdout, nothing else.")] = False,
) -> None:
    """Find which layers of a DSA model can share their top-k indices, and write a pattern file.

    Writes pattern.yaml, metrics.json and report.html. Without options it searches the demo model.
    """
    from indexcache_search.search import Settings

    console = Console(stderr=True, highlight=False)
    with _errors_in_one_line(console):
        if model is None and calibration is None:
            calibration, evaluation = list(demo.CALIBRATION), evaluation or list(demo.EVALUATION)
        if not calibration:
            raise SearchError("--calibration is missing, expected a file, folder or hub id with text like your traffic")
        retentions = tuple(dict.fromkeys(parse_retention(item) for item in retain.split(",")))
        settings = Settings(retentions, strategy.value, blocks, objective.value, seed)
        name = (
            "demo"
            if model is None
            else Path(model).resolve().name
            if Path(model).is_dir()
            else model.rpartition("/")[2]
        )
        folder = output or Path(f"indexcache-{name}")
        with console.status(f"Loading {name}"):
            loaded, data, held_out = _load(
                str(model or demo.MODEL),
                calibration,
                evaluation or calibration,
                seq_len=seq_len or (DEMO_SEQ_LEN if model is None else None),
                counts=(num_sequences, num_eval_sequences),
                settings=settings,
                runtime=(device, dtype, batch_size, prefix_cache_gb),
            )
        _run(loaded, data, held_out, settings, folder, work_dir or folder / "work", restart, report, json_, console)


@contextmanager
def _errors_in_one_line(console: Console) -> Iterator[None]:
    try:
        yield
    except IndexCacheError as error:
        console.print(f"indexcache-search: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except NonFiniteLossError as error:
        console.print(f"indexcache-search: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("\nInterrupted. The same command goes on from here.", style="yellow")
        raise typer.Exit(130) from None


def _load(
    model: str,
    calibration: list[str],
    evaluation: list[str],
    *,
    seq_len: int | None,
    counts: tuple[int, int],
    settings: Settings,
    runtime: tuple[str, str, int, float],
) -> tuple[Engine, TokenSet, TokenSet]:
    """Read the data before the weights: mistakes in the first are common, and the second takes long."""
    from indexcache_search.calibration import TokenReader, build_token_sets
    from indexcache_search.engines.transformers import (
        TransformersEngine,
        describe_model,
        load_tokenizer,
        read_config,
        set_quiet,
    )

    set_quiet()
    description = describe_model(model)
    settings.check(description)
    config = read_config(model)
    length = seq_len or 4 * description.index_topk
    if length > config.max_position_embeddings:
        raise SearchError(f"--seq-len is {length}, but the model was made for {config.max_position_embeddings} tokens")
    reader = TokenReader(lambda: load_tokenizer(model), config.vocab_size, length)
    data, held_out = build_token_sets(
        reader,
        description,
        calibration,
        evaluation,
        seq_len=length,
        num_calibration=counts[0],
        num_evaluation=counts[1],
        seed=settings.seed,
    )
    return TransformersEngine.load(model, *runtime), data, held_out


def _run(
    engine: Engine,
    data: TokenSet,
    held_out: TokenSet,
    settings: Settings,
    folder: Path,
    work_dir: Path,
    restart: bool,
    report: bool,
    as_json: bool,
    console: Console,
) -> None:
    from indexcache_search import metrics, tables
    from indexcache_search.search import Search, identity, today

    if restart:
        (work_dir / "journal.jsonl").unlink(missing_ok=True)
    seconds: dict[str, float] = {}
    partial = folder / "pattern.partial.yaml"
    with Journal(work_dir, identity(engine, data, held_out, settings), today()) as journal:
        search = Search(engine, data, held_out, settings, journal)

        with SearchProgress(console) as progress:
            search.on_evaluation = progress.evaluated

            def on_step(step: Step, steps: tuple[Step, ...]) -> None:
                search.partial_file(steps).save(partial)
                progress.committed(step, len(steps))

            began = time.monotonic()
            progress.begin(f"{settings.strategy} search", search.planned_evaluations(), data)
            search.evaluate_baseline()
            found = search.find(on_step)
            seconds["search"] = time.monotonic() - began
            began = time.monotonic()
            progress.wait("cross-layer overlap and similarity")
            overlap = search.overlap(OVERLAP_ROWS)
            patterns = search.comparison_patterns(found)
            seconds["overlap and similarity"] = time.monotonic() - began
            began = time.monotonic()
            progress.begin("held-out comparison", len({str(pattern) for _, _, pattern in patterns}), held_out)
            rows = search.compare(patterns)
            seconds["held-out comparison"] = time.monotonic() - began
        result = metrics.collect(search, found, rows, overlap, seconds)
        search.pattern_file(found).save(folder / "pattern.yaml")
        partial.unlink(missing_ok=True)
    write_atomically(folder / "metrics.json", json.dumps(result, indent=1) + "\n")
    written = ["pattern.yaml", "metrics.json"]
    if report:
        from indexcache_search.report import render

        write_atomically(folder / "report.html", render(result))
        written.append("report.html")
    if as_json:
        json.dump(result, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    out.print(tables.terminal_table(result["held_out"]))
    for retention, pattern in found.patterns.items():
        out.print(f"{retention!s:>4}  {pattern}", soft_wrap=True)
    out.print(f"Wrote {', '.join(str(folder / name) for name in written)}", soft_wrap=True)
