"""The command line: indexcache-search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from indexcache_search import demo
from indexcache_search.cli import options
from indexcache_search.cli.bounded import SEQUENCES, Bounds, ShareAt
from indexcache_search.cli.command import (
    Config,
    OptionNeed,
    Version,
    application,
    command_line,
    number,
    option,
    running,
    settings,
)
from indexcache_search.cli.config import server_flags
from indexcache_search.cli.engines import EngineChoice, engine_option
from indexcache_search.cli.extra import example_of
from indexcache_search.cli.help import MORE
from indexcache_search.console import results
from indexcache_search.data import JUDGED, SEARCHED, SEARCHED_IN_TIME
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.strategies import DEFAULT_RETAIN, DEFAULT_STRATEGY, strategies, strategy_of
from indexcache_search.strategies.base import BudgetRequest
from sglang_indexcache import process
from sglang_indexcache.command_line import exit_codes
from sglang_indexcache.http.address import Address
from sglang_indexcache.pattern.indexer_setting import QUERIES

EPILOG = f"""
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
  indexcache-search --model ./my-dsa-model --calibration text.jsonl --calibration code.jsonl --evaluation other.jsonl
      Several sources count equally, and so do the sequences of each. Without --evaluation, held-out text is set aside
      from the calibration sources.

\b
  indexcache-search --config glm5.yaml --seed 1
      Options of a file, such as `retain: 1/4` or `strategy: {{name: lazy, flips: 2}}`; flags win over it.

Run the same command again to go on after a kill, a crash or Ctrl-C.
{MORE}
\b
  indexcache-search --strategy greedy:blocks=4 --objective nll
      The paper's Algorithm 1, in four blocks. Strategies share their evaluations in the same --work-dir.

\b
  indexcache-search --prefill 0.4
      Prompts of 131,072 tokens in at most 0.4 of the time that the model's own pattern takes: layers may select for up
      to 16 queries at a time (docs/blocks.md). F and S at --retain stand beside it.

{example_of("selection")}
{example_of("bytes")}
Strategies, and what they evaluate (docs/reference/strategies.md):

\b
{chr(10).join(f"  {name:<12}{item.summary}" for name, item in strategies().items())}

Their settings: flips (of lazy: evaluated in a step at least; 1; more is surer and dearer), race (no: all sequences at
once, where a strategy looks at a part of them first), swaps (a local search after the strategy tries so many a round;
0), blocks (of greedy: so many blocks of layers in turn; 1).

{exit_codes("the run failed (a loss was not finite)")}
"""


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """A strategy and its settings; the strategy's own defaults stand for settings that are not given.

    Raises:
        SearchError: if there is no such strategy, or it does not read one of the settings.
    """

    name: str = DEFAULT_STRATEGY
    flips: Annotated[int, Bounds(1, 10_000)] | None = None
    race: bool | None = None
    swaps: Annotated[int, Bounds(0, 100_000)] | None = None
    blocks: Annotated[int, Bounds(1, 10_000)] | None = None

    def __post_init__(self) -> None:
        if self.name not in strategies():
            raise SearchError(f"found {self.name!r}, expected one of {', '.join(strategies())}")
        known = strategies()[self.name].settings()
        for key in self.given().keys() - set(known):
            raise SearchError(f"{self.name} has no setting {key}, expected {', '.join(known)}")

    def given(self) -> dict[str, Any]:
        """Return the settings that were given."""
        return {key: value for key, value in vars(self).items() if key != "name" and value is not None}


@dataclass(frozen=True)
class TimeShare(ShareAt):
    """A share of a time, and the tokens for which it is meant."""

    context: int = 131_072


@dataclass(frozen=True, kw_only=True)
class PrefillChoice:
    """The time that a prompt may take, the sizes of blocks, and the latency table; `None` leaves it to the model."""

    time: TimeShare
    queries: tuple[Annotated[int, Bounds(2, 64)], ...] | None = None
    prices: str | None = None

    def __post_init__(self) -> None:
        for size in set(self.queries or ()) - set(QUERIES):
            raise SearchError(f"queries: found {size}, expected {', '.join(map(str, QUERIES))}")


@dataclass(frozen=True, kw_only=True)
class DecodeChoice:
    """The time that a decoding step may take, and the latency table."""

    time: TimeShare
    prices: str | None = None


def _on_servers(given: Any) -> bool:
    return given["engine"] is not None and given["engine"].kind.on_servers


PRICE = Bounds(0, 1_000_000)
OWN = OptionNeed("a server of the search's own, without --endpoint", lambda given: not given["endpoint"])
NEEDS = {
    "prefill": (OptionNeed("--engine transformers", lambda given: not _on_servers(given)),),
    "bytes": (
        OptionNeed("--engine transformers", lambda given: not _on_servers(given)),
        OptionNeed("no --prefill", lambda given: given["prefill"] is None),
    ),
    "decode": (OptionNeed("--prefill", lambda given: given["prefill"] is not None),),
    "endpoint": (OptionNeed("--engine sglang", _on_servers),),
    **dict.fromkeys(("device", "dtype"), (OWN,)),
    "estimate": (OptionNeed("a run without --dry-run", lambda given: not given["dry_run"]),),
    "hourly_price": (OptionNeed("--estimate", lambda given: given["estimate"]),),
}


def search(
    context: typer.Context,
    *,
    model: options.Model = None,
    selection: options.Selection = None,
    calibration: options.Calibration = None,
    evaluation: options.HeldOutOrSame = None,
    rows: options.Rows = None,
    dry_run: options.DryRun = False,
    estimate: Annotated[
        bool,
        option("Search for a minute, say what all of it takes, and end; the search goes on from there.", "--estimate"),
    ] = False,
    hourly_price: Annotated[
        float | None, number("With --estimate: what an hour of the machine costs, in any currency.", PRICE)
    ] = None,
    seq_len: options.SeqLen = None,
    num_sequences: Annotated[
        int | None,
        number(
            f"Sequences, of all sources together. Default: {SEARCHED}, with --prefill {SEARCHED_IN_TIME}.", SEQUENCES
        ),
    ] = None,
    num_eval_sequences: Annotated[
        int | None, number(f"Held-out sequences. Default: {JUDGED}, for the demo {demo.SEQUENCES}.", SEQUENCES)
    ] = None,
    reply: options.Reply = None,
    seed: options.Seed = 0,
    retain: Annotated[str, options.shares("Shares of the layers that stay F, or D.")] = DEFAULT_RETAIN,
    prefill: Annotated[
        PrefillChoice | None,
        settings(
            PrefillChoice,
            "Also find the pattern of least loss with which a prompt takes at most this share of the time that it takes"
            " with the model's own: 0.4, or 0.4@65536 for prompts of 65,536 tokens (131072). Its F layers may select"
            " for blocks of prompt queries, and the last quarter of each sequence counts, unless --reply says"
            " otherwise. Keys: queries (sizes of blocks; 2/4/8/16), prices (a latency table: glm-5-tp8, glm-5-dp,"
            " deepseek-v3.2-tp8 or a file; the model's). These three are of layers alone, without experts and"
            " all-reduces: a whole model's share is larger.",
            "SHARE",
        ),
    ] = None,
    decode: Annotated[
        DecodeChoice | None,
        settings(DecodeChoice, "With --prefill: likewise of the time of a decoding step. Key: prices.", "SHARE"),
    ] = None,
    bytes: options.ByteBudget = None,
    strategy: Annotated[
        StrategyChoice | None,
        settings(StrategyChoice, f"How to look for patterns, see below. Default: {DEFAULT_STRATEGY}.", "NAME"),
    ] = None,
    objective: Annotated[
        Objective, option("kl: divergence from the model's own pattern. nll: loss on the text, the paper's.")
    ] = "kl",
    engine: Annotated[
        EngineChoice | None,
        engine_option(
            "transformers, or sglang, whose server gets options that are unknown here (--tp 8). Keys of transformers:"
            f" {options.ATTENTION}, prefix_cache_gb (memory for layer outputs that patterns share, the GPU's where"
            " four times as much is free, else the host's; 2, for the demo 1.7; 0: none). Default: transformers.",
            servers=True,
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        option("sglang: a server in calibration mode instead of one's own; repeatable.", metavar="URL"),
    ] = None,
    device: options.Device = "auto",
    dtype: Annotated[
        str | None, option("float32, bfloat16 or float16. Default: float32; with sglang, the model's own.")
    ] = None,
    batch_size: options.BatchSize = 1,
    output: Annotated[Path | None, option("Folder of the results. Default: indexcache-NAME.")] = None,
    work_dir: options.WorkDir = None,
    restart: options.Restart = False,
    config: Config = None,
    version: Version = False,
) -> None:
    """Find which layers of a model can share what they attend to, and write a pattern file.

    Writes pattern.yaml, metrics.json, report.html and a README.md. Without options it searches the demo model.
    """
    how, chosen, is_demo = strategy or StrategyChoice(), engine or EngineChoice(), model is None
    with running(context, NEEDS) as console:
        flags = server_flags(context, chosen.kind.on_servers and not endpoint)
        if not chosen.kind.on_servers:
            options.check_runs_here(device, dtype)
        if is_demo and calibration is None:
            calibration, evaluation = list(demo.CALIBRATION), evaluation or list(demo.EVALUATION)
        if not calibration:
            raise SearchError("--calibration is missing, expected a file, folder or hub id with text like your traffic")
        selects, row_options = options.selection_of(selection), options.row_options(rows)
        addresses = tuple(map(Address.of, endpoint or ()))
        from indexcache_search.data.packing import Wish
        from indexcache_search.searching.settings import BLOCKS, Budget, Settings, TimeBudget

        budget: BudgetRequest | None = bytes
        if prefill is not None:
            budget = TimeBudget(
                prefill=Budget(prefill.time.share, prefill.time.context, prefill.prices),
                queries=prefill.queries or BLOCKS,
                decode=None if decode is None else Budget(decode.time.share, decode.time.context, decode.prices),
            )
        what = Settings(
            retain=options.retentions(retain),
            strategy=strategy_of(how.name, budget=budget, **how.given()),
            objective=objective,
            budget=budget,
        )
        from indexcache_search.searching.begin import show_data
        from indexcache_search.searching.forecasts import estimate as estimated
        from indexcache_search.searching.job import Files, SearchData, SearchJob
        from indexcache_search.searching.run import run
        from indexcache_search.searching.show import show

        folder = output or Path(f"indexcache-{_short_name(model)}")
        job = SearchJob(
            model=str(model or demo.MODEL),
            data=SearchData(
                calibration=tuple(calibration),
                evaluation=tuple(evaluation or calibration),
                seq_len=seq_len or (512 if is_demo else None),
                seed=seed,
                num_sequences=Wish.unless(num_sequences, SEARCHED if prefill is None else SEARCHED_IN_TIME),
                num_eval_sequences=Wish.unless(num_eval_sequences, demo.SEQUENCES if is_demo else JUDGED),
                reply=reply,
                rows=row_options,
            ),
            run=chosen.run(
                {"prefix_cache_gb": 1.7 if is_demo else 2.0},
                device=device,
                dtype=dtype,
                batch_size=batch_size,
                endpoints=addresses,
                server_arguments=flags,
                selection=selects,
            ),
            settings=what,
            files=Files(folder=folder, work_dir=work_dir or folder / "work", restart=restart),
            console=console,
            command=command_line(context),
        )
        if dry_run:
            show_data(job)
            return
        process.let_work_end()
        if estimate:
            results().print(estimated(job, hourly_price), soft_wrap=True)
            return
        show(run(job), model, job.files, results())


def _short_name(model: str | None) -> str:
    if model is None:
        return "demo"
    return Path(model).resolve().name if Path(model).is_dir() else model.rpartition("/")[2]


app = application({"indexcache-search": search}, EPILOG, allow_extra_args=True, ignore_unknown_options=True)
