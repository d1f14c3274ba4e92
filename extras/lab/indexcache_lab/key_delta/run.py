"""A whole search for thresholds: from a model's name and data sources to thresholds.json and a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from indexcache_lab.dense import describe_dense
from indexcache_lab.key_delta.compare import BITS, compare, figures
from indexcache_lab.key_delta.engine import Costs, KeyEngine, main_stage
from indexcache_lab.key_delta.file import KeyFile
from indexcache_lab.key_delta.plan import LONG, KeyPlan
from indexcache_lab.key_delta.search import KeySearch, Thresholds
from indexcache_search.console import announce, bar, command, results, warn
from indexcache_search.data import dry_run
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.sketch import Sketch
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.settings import RunSettings
from indexcache_search.errors import SearchError
from indexcache_search.eval import result
from indexcache_search.eval.held_out import ComparisonSet
from indexcache_search.eval.run import show
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.identity import engine_words, identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.judge import Judge
from indexcache_search.hf.loading import set_quiet
from indexcache_search.results.schema import ComparisonResult
from indexcache_search.results.variant import NAMED, Variant
from indexcache_search.searching.begin import token_sets
from indexcache_search.searching.job import Files, SearchData
from indexcache_search.workdir.outputs import outputs
from sglang_indexcache import ModelLayers
from sglang_indexcache.command_line import error_context
from sglang_indexcache.pattern_file.file import ModelSection

COMMAND = "indexcache-lab key-delta search"
EVER = r"thresholds-[0-9.e+-]{1,30}\.json"


def shares_of(text: str) -> tuple[float, ...]:
    """Read shares, separated by commas.

    Raises:
        SearchError: if one is not a number between 0 and 1.
    """
    try:
        shares = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < 1 for share in shares):
        raise SearchError(f"--skip is {text[:60]!r}, expected shares between 0 and 1")
    if len({_file_name(share) for share in shares}) < len(shares):
        raise SearchError(f"--skip is {text[:60]!r}: two shares are the same to six digits")
    return shares


def _file_name(share: float) -> str:
    return f"thresholds-{share:g}.json"


def run(
    model: str,
    data: SearchData,
    runtime: RunSettings,
    files: Files,
    console: Console,
    *,
    shares: Sequence[float],
    near: Mapping[str, Any],
) -> None:
    """Search thresholds of `model`, a dense one; write and print them with a comparison on held-out data.

    Args:
        model: folder or hub id.
        data: the calibration and the held-out data.
        runtime: how plans are evaluated.
        files: where results and journal go.
        console: for messages.
        shares: shares of the products of queries with keys to leave out.
        near: `window`, `max_window` and `recent` of a `KeyPlan`, instead of its own.

    Raises:
        IndexCacheError: if a request can't be fulfilled.
        NonFiniteLossError: if a loss is NaN or infinite.
    """
    names = [*map(_file_name, shares), *result.FILES]
    reads = {"--model": [model], "--calibration": data.calibration, "--evaluation": data.evaluation}
    with ExitStack() as stack:
        out = stack.enter_context(outputs(COMMAND, files.folder, files.work_dir, names, reads, ever=EVER))
        description, reader, calibration, held_out = _load_data(model, data)
        nothing = KeyPlan(method="key_delta", values=(0.0,) * description.num_layers, **near)
        for note in reader.notes:
            warn(console, note)
        with error_context("loading the model"):
            engine = KeyEngine.load(model, **runtime.here, notice=partial(announce, console))
            engine.model = description
        belongs_to = identity(engine, calibration, held_out, "kl")
        journal = stack.enter_context(Journal(out.journal(), belongs_to, today(), files.restart, engine.parse))
        chooses = Evaluator(engine, calibration, "kl", journal, "calibration")
        costs = Costs(engine, calibration, journal, main_stage(calibration), "calibration")
        with error_context("search"), bar(console) as progress:
            task = progress.add_task("thresholds of single layers", total=None)
            planned, notice = partial(progress.update, task), partial(console.print, soft_wrap=True)
            chooses.on_evaluation = lambda _: progress.advance(task)
            search = KeySearch(engine, chooses, costs, nothing, lambda plans: planned(total=plans), notice=notice)
            found = search.find(shares)
        written = {_file_name(item.asked): _text(item, description, chooses, costs) for item in found}
        for item in found:
            console.print(
                f"{item.asked:g}: {item.plan.name}; one threshold: {item.uniform.values[0]:g}", soft_wrap=True
            )
        with error_context("held-out comparison"), bar(console) as progress:
            plans = 1 + 4 * len(found) + len(BITS)
            task = progress.add_task("held-out comparison", total=2 * plans * held_out.num_sequences)
            lines = []
            for item in found:
                lines.append(Variant(NAMED, f"searched, {item.asked:g}", None, item.plan))
                lines.append(Variant(NAMED, f"one threshold, {item.asked:g}", None, item.uniform))
            built, rivalled = ComparisonSet(held_out, {}), [item.plan for item in found]
            compared = compare(engine, journal, lines, built, partial(progress.advance, task), rivalled=rivalled)
            comparison = result.collect(compared, built, description, engine=engine_words(engine))
            judge = Judge(Evaluator(engine, held_out, "kl", journal, "kl"))
            gains = {item.asked: judge.difference(item.uniform, item.plan) for item in found}
        engine.check_unchanged()
        out.replace({**written, **result.texts(comparison, figures(comparison.held_out))}, console)
        _show(comparison, gains, [files.folder / name for name in written], model)


def show_data(model: str, data: SearchData) -> None:
    """Read the data as `run` does, print what was read, and do nothing else.

    Raises:
        IndexCacheError: as `run`.
    """
    _, reader, calibration, held_out = _load_data(model, data)
    dry_run.show(reader, {"evaluation": held_out, "calibration": calibration})


def _load_data(model: str, data: SearchData) -> tuple[ModelLayers, TokenReader, TokenSet, TokenSet]:
    set_quiet()
    seq_len = data.seq_len or LONG
    description = replace(describe_dense(model), first_sparse_position=seq_len // 4)
    with error_context("reading the data"):
        return description, *token_sets(model, description, data, seq_len)


def _text(found: Thresholds, model: ModelLayers, chooses: Evaluator, costs: Costs) -> str:
    data = chooses.data
    kl, uniform_kl = Judge(chooses).losses([found.plan, found.uniform])
    return KeyFile(
        schema="indexcache-keys/v1",
        model=ModelSection.of(model),
        method="key_delta",
        thresholds=list(found.plan.values),
        window=found.plan.window,
        max_window=found.plan.max_window,
        recent=found.plan.recent,
        skipped=found.asked,
        measured=costs.skipped(found.plan).mean,
        kl=kl,
        uniform=[found.uniform.values[0], uniform_kl],
        calibration_sha256=data.sha256,
        sketch=Sketch.of(data.tokens).encode(),
    ).dumps()


def _show(comparison: ComparisonResult, gains: Mapping[float, Estimate], written: Sequence[Path], model: str) -> None:
    """Print the comparison, the KL saved over one threshold by share, the files, and the next command."""
    out = results()
    show(comparison, written[0].parent, out)
    for share, gain in gains.items():
        error = "" if gain.stderr is None else f" ±{gain.stderr:.4f}"
        words = "one threshold for all layers has"
        out.print(f"{share:g}: {words} {gain.mean:+.4f}{error} KL more than the searched ones", soft_wrap=True)
    out.print(f"Wrote {', '.join(map(str, written))}", soft_wrap=True)
    evaluate = command("indexcache-lab", "key-delta", "eval", "--model", model, "--threshold", written[0])
    out.print(f"Next: {evaluate} --evaluation ...", soft_wrap=True)
