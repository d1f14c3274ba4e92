"""The cost of each strategy, and the quality of its patterns: one table for a model.

    python -m scripts.bench.search.strategies                        # the demo model, 3 calibration seeds
    python -m scripts.bench.search.strategies --model build/models/deep24 --device cuda --batch-size 8
    python -m scripts.bench.search.strategies --model sim:78         # a simulated model of 78 layers for each seed

Many seeds run side by side, also where the data libraries are missing:

    python -m scripts.bench.search.strategies --seeds 0,1,2,3 --write-sets build/sets
    python -m scripts.bench.search.strategies --sets build/sets --seeds 0,1 --output a.json &
    python -m scripts.bench.search.strategies --sets build/sets --seeds 2,3 --output b.json & wait
    python -m scripts.bench.search.strategies --sets build/sets --merge a.json b.json

Every strategy runs by itself, with a journal and a prefix cache of its own. Cost: patterns evaluated, and layer-tokens
(layers that really ran x tokens) relative to the paper's Algorithm 1, which runs every layer of every evaluation.
Quality: increase of the held-out loss over the own pattern of the checkpoint, mean over seeds; errors are over held-out
sequences, which are the same for all seeds. With --against the difference to that strategy follows. A second table has
errors over seeds, and the worst seed. Simulated models differ more than sequences do, so a third one has the relative
differences with errors over models.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search import demo
from indexcache_search.cli.search import TimeShare
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import Engine
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.evaluator import Cost, Evaluator
from indexcache_search.evaluation.identity import identity, today
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Losses
from indexcache_search.hf.loading import describe_model, load_tokenizer, read_config, set_quiet
from indexcache_search.searching.matrices import Matrices
from indexcache_search.searching.search import Search
from indexcache_search.searching.settings import Budget, Settings, TimeBudget
from indexcache_search.strategies.budget.search import BudgetSearch
from indexcache_search.strategies.exhaustive import Exhaustive
from indexcache_search.strategies.greedy import Greedy
from indexcache_search.strategies.lazy import Lazy
from indexcache_train.training.stored import load_set, save_set
from scripts.bench.search.simulated import SimulatedEngine, Structure
from scripts.bench.timing import timed
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import parse_retention

EVERYTHING = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 8))
VARIANTS = {
    "greedy (Algorithm 1)": Settings(retain=EVERYTHING, strategy=Greedy()),
    "lazy, no racing": Settings(retain=EVERYTHING, strategy=Lazy(race=False)),
    "lazy": Settings(retain=EVERYTHING),
    "lazy, 2 candidates": Settings(retain=EVERYTHING, strategy=Lazy(flips=2)),
    "lazy, 3 candidates": Settings(retain=EVERYTHING, strategy=Lazy(flips=3)),
    "lazy + swaps": Settings(retain=EVERYTHING, strategy=Lazy(swaps=16)),
    "lazy, in time": Settings(
        retain=EVERYTHING, strategy=BudgetSearch(), budget=TimeBudget(prefill=Budget(0.37, 131072, "glm-5-tp8"))
    ),
    "greedy + swaps": Settings(retain=EVERYTHING, strategy=Greedy(swaps=32)),
    "exhaustive": Settings(retain=EVERYTHING, strategy=Exhaustive()),
}
DEFAULT = ("greedy (Algorithm 1)", "lazy", "lazy + swaps")
ALIKE = ("model", "retain", "prefill", "objective", "sequences", "eval_sequences", "seq_len", "reply")


@dataclass(frozen=True)
class Case:
    """One seed's data, and a way to get an engine that remembers nothing."""

    new_engine: Callable[[], Engine]
    calibration: TokenSet
    held_out: TokenSet


@dataclass(frozen=True)
class Run:
    """The patterns of one strategy with one seed: held-out evaluations by retention, of the baseline under 1."""

    cost: Cost
    share: float
    seconds: float
    patterns: Mapping[Fraction, Pattern]
    held_out: Mapping[Fraction, Losses]

    def as_json(self) -> dict[str, Any]:
        return {
            "cost": asdict(self.cost),
            "share_of_algorithm_1": self.share,
            "seconds": round(self.seconds, 1),
            "patterns": {str(kept): pattern.letters for kept, pattern in self.patterns.items()},
            "held_out": {str(kept): item.losses for kept, item in self.held_out.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any], data: TokenSet) -> Run:
        """Read the content that `as_json` wrote; missing figures are 0 or empty."""
        patterns = {Fraction(kept): Pattern.parse(letters) for kept, letters in content["patterns"].items()}
        sequences, tokens = range(data.num_sequences), tuple(data.scored.sum(1).tolist())
        held_out = {
            Fraction(kept): Losses(rows=tuple(sequences), losses=tuple(losses), tokens=tokens)
            for kept, losses in content["held_out"].items()
        }
        share, seconds = content["share_of_algorithm_1"], content["seconds"]
        return cls(Cost(**content["cost"]), share, seconds, patterns, held_out)


def run(case: Case, settings: Settings) -> Run:
    """Search with a journal of its own."""
    engine = case.new_engine()
    with tempfile.TemporaryDirectory() as folder:
        names = identity(engine, case.calibration, case.held_out, settings.objective)
        with Journal(Path(folder), names, today()) as journal:
            calibration = Evaluator(engine, case.calibration, settings.objective, journal, "calibration")
            matrices = Matrices(engine, case.calibration, journal)
            search = Search(engine, calibration, settings.strategy, settings.goal(engine.model), matrices.measured)
            found, seconds = timed(search.find)
            patterns = {Fraction(1): engine.model.native, **found.patterns}
            if found.within_budget is not None and isinstance(settings.budget, TimeBudget):
                patterns[_column(settings.budget.prefill)] = found.within_budget
            judges = Evaluator(engine, case.held_out, "nll", journal, "held-out")
            held_out = dict(zip(patterns, judges.evaluations(list(patterns.values())), strict=True))
    found_patterns = {kept: pattern for kept, pattern in patterns.items() if kept != 1}
    return Run(found.cost, found.cost.layer_tokens / found.algorithm_1, seconds, found_patterns, held_out)


def _column(budget: Budget) -> Fraction:
    """Return the column of the pattern within a budget: its time, which is no retention of the patterns beside it."""
    return Fraction(str(budget.share))


def token_sets(options: argparse.Namespace) -> Iterator[tuple[int, TokenSet, TokenSet]]:
    """Yield each seed's calibration and held-out set, from the demo's data or a folder."""
    for seed, *sets in _token_sets(options):
        calibration, held_out = (
            sets if options.reply is None else [item.ending_in_replies(options.reply) for item in sets]
        )
        yield seed, calibration, held_out


def _token_sets(options: argparse.Namespace) -> Iterator[tuple[int, TokenSet, TokenSet]]:
    if options.sets is not None:
        for seed in map(int, options.seeds.split(",")):
            calibration, held_out = (load_set(options.sets / name) for name in (f"calibration-{seed}", "held-out"))
            if calibration is None or held_out is None:
                raise SystemExit(f"{options.sets}: has no sets of seed {seed}; expected --write-sets before")
            yield seed, calibration, held_out
        return
    folder: Path | None = options.data
    sources: tuple[tuple[str, ...], tuple[str, ...]] = demo.CALIBRATION, demo.EVALUATION
    if folder is not None:
        found = sorted(folder.glob("calibration-*.jsonl"), reverse=True)  # text first, of two
        evaluation = [folder / f"{name.removeprefix('demo:')}.jsonl" for name in demo.EVALUATION]
        sources = tuple(map(str, found)), tuple(map(str, evaluation))
    reader = TokenReader(lambda: load_tokenizer(options.model), read_config(options.model).vocab_size, options.seq_len)
    for seed in map(int, options.seeds.split(",")):
        packer = Packer(reader, describe_model(options.model), options.seq_len)
        held_out = packer.held_out(sources[1], options.eval_sequences)
        yield seed, packer.collect(sources[0], options.sequences, seed, "calibration"), held_out


def write_sets(options: argparse.Namespace) -> None:
    """Write the sets of all seeds; the held-out one is the same for all."""
    for seed, calibration, held_out in _token_sets(options):
        for name, data in ((f"calibration-{seed}", calibration), ("held-out", held_out)):
            save_set(data, options.write_sets / name)


def transformers_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the demo's calibration and held-out data for a real model."""
    set_quiet()
    loaded = TransformersEngine.load(options.model, options.device)
    for _, calibration, held_out in token_sets(options):
        yield Case(
            lambda: type(loaded)(loaded.torch_model, loaded.model, options.batch_size, options.prefix_cache_gb),
            calibration,
            held_out,
        )


def simulated_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield another simulated model for each seed."""
    layers = int(options.model.removeprefix("sim:"))
    for seed in map(int, options.seeds.split(",")):
        engine = SimulatedEngine(layers, seed, Structure())
        calibration, held_out = engine.tokens(options.sequences, seed=1), engine.tokens(options.eval_sequences, seed=2)
        yield Case(partial(SimulatedEngine, layers, seed, Structure()), calibration, held_out)


def take_options_of_runs(options: argparse.Namespace) -> None:
    """Set what decides about figures to what the files of `--merge` were made with; refuse files that differ."""
    made_with = [json.loads(path.read_text())["options"] for path in options.merge]
    for name in ALIKE:
        values = {item.get(name) for item in made_with}
        if len(values) > 1:
            flag = "--" + name.replace("_", "-")
            raise SystemExit(f"--merge: files made with {flag} {', '.join(sorted(map(str, values)))}; expected one")
        setattr(options, name, values.pop())


def merged(files: Sequence[Path], data: TokenSet) -> dict[str, list[Run]]:
    """Merge the results of several runs, by strategy in the order of seeds."""
    found: dict[str, dict[int, Run]] = {}
    for content in (json.loads(path.read_text()) for path in files):
        seeds = [int(seed) for seed in content["options"]["seeds"].split(",")]
        for name, items in content["runs"].items():
            found.setdefault(name, {}).update(
                {seed: Run.from_json(item, data) for seed, item in zip(seeds, items, strict=False)}
            )
    common = set.intersection(*(set(runs) for runs in found.values()))
    return {name: [runs[seed] for seed in sorted(common)] for name, runs in found.items()}


def mean_over_seeds(runs: Sequence[Run], kept: Fraction) -> Losses:
    """Average the held-out losses of each sequence over seeds."""
    losses = np.mean([item.held_out[kept].losses for item in runs], axis=0)
    return replace(runs[0].held_out[kept], losses=tuple(losses.tolist()))


def rows(
    runs: Mapping[str, Sequence[Run]], retain: Sequence[Fraction], data: TokenSet, against: str
) -> list[list[str]]:
    """Return the cells of the table."""
    table = []
    for name, items in runs.items():
        cells = [
            name,
            f"{np.mean([item.cost.evaluations for item in items]):.0f}",
            f"{np.mean([item.share for item in items]):.1%}",
            f"{np.mean([item.seconds for item in items]):.0f}",
        ]
        for kept in retain:
            if kept not in items[0].held_out:
                cells.append("")
                continue
            mean = mean_over_seeds(items, kept)
            increase = estimates.increase(mean, mean_over_seeds(items, Fraction(1)), data)
            cells.append(f"{increase.mean:+.4f} ±{increase.stderr:.4f}")
            if name != against and against in runs and kept in runs[against][0].held_out:
                difference = estimates.increase(mean, mean_over_seeds(runs[against], kept), data)
                cells[-1] += f" ({difference.mean:+.4f} ±{difference.stderr:.4f})"
        table.append(cells)
    return table


def rows_over_models(runs: Mapping[str, Sequence[Run]], retain: Sequence[Fraction], against: str) -> list[list[str]]:
    """Return relative differences of the increases to those of `against`, with standard errors over models."""
    table = []
    for name, items in runs.items():
        cells = [name]
        for kept in retain:
            losses = [
                [sum(item.held_out[at].losses) for item in runs[which]]
                for which in (name, against)
                for at in (kept, Fraction(1))
            ]
            found, baseline, other, _ = map(np.asarray, losses)
            relative = (found - other) / (other - baseline)
            cells.append(f"{relative.mean():+.1%} ±{relative.std(ddof=1) / np.sqrt(len(items)):.1%}")
        table.append(cells)
    return table


def rows_over_seeds(
    runs: Mapping[str, Sequence[Run]], retain: Sequence[Fraction], data: TokenSet, against: str
) -> list[list[str]]:
    """Return mean increases with standard errors over seeds, the worst seed, and the paired difference to `against`."""

    def increases(items: Sequence[Run], kept: Fraction) -> NDArray[np.float64]:
        return np.asarray(
            [estimates.increase(item.held_out[kept], item.held_out[Fraction(1)], data).mean for item in items]
        )

    def with_error(values: NDArray[np.float64]) -> str:
        return f"{values.mean():+.4f} ±{values.std(ddof=1) / np.sqrt(len(values)):.4f}"

    table = []
    for name, items in runs.items():
        shares = [item.share for item in items]
        cells = [name, f"{np.mean(shares):.1%}, at most {max(shares):.1%}"]
        for kept in retain:
            if kept not in items[0].held_out:
                cells.append("")
                continue
            own = increases(items, kept)
            cells.append(f"{with_error(own)}, worst {own.max():+.4f}")
            if name != against and against in runs and kept in runs[against][0].held_out:
                cells[-1] += f" ({with_error(own - increases(runs[against], kept))})"
        table.append(cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo.MODEL), help="folder, or sim:LAYERS")
    parser.add_argument("--strategies", default=";".join(DEFAULT), help=f"of {'; '.join(VARIANTS)}")
    parser.add_argument("--seeds", default="0,1,2", help="orders of the calibration documents")
    parser.add_argument("--retain", default="1/2,1/4,1/8")
    parser.add_argument("--prefill", default="0.37@131072", help="time of prompts for 'lazy, in time'")
    parser.add_argument("--objective", default="nll", choices=("nll", "kl"))
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--eval-sequences", type=int, default=144)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument(
        "--reply", type=int, help="tokens of a sequence that count, behind a prompt (blocks of queries)"
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="as of build_demo --data; by default the demo's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prefix-cache-gb", type=float, default=1.7)
    parser.add_argument("--against", default=DEFAULT[0])
    parser.add_argument("--output", type=Path, default=Path("bench_search.json"))
    parser.add_argument("--write-sets", type=Path, metavar="FOLDER", help="only write the token sets of all seeds")
    parser.add_argument("--sets", type=Path, metavar="FOLDER", help="token sets that were written before")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="only show what several runs found")
    options = parser.parse_args()
    if options.write_sets is not None:
        write_sets(options)
        return
    if options.merge:
        take_options_of_runs(options)
    retain = tuple(parse_retention(item) for item in options.retain.split(","))
    time = TimeShare.parse(options.prefill)
    budget = Budget(time.share, time.context, "glm-5-tp8")
    in_time = any(VARIANTS[name].budget for name in options.strategies.split(";"))
    columns = (*retain, *([_column(budget)] if in_time else []))
    runs: dict[str, list[Run]] = {name: [] for name in options.strategies.split(";")}
    if options.merge:
        _, _, data = next(token_sets(options))
        runs = merged(options.merge, data)
    new_cases = simulated_cases if options.model.startswith("sim:") else transformers_cases
    for number, case in enumerate(() if options.merge else new_cases(options)):
        data = case.held_out
        for name, items in runs.items():
            settings = replace(VARIANTS[name], retain=retain, objective=options.objective)
            settings = settings if settings.budget is None else replace(settings, budget=TimeBudget(prefill=budget))
            items.append(run(case, settings))
            found = rows({name: items[-1:]}, columns, data, "")[0][1:]
            print(f"seed {number}, {name}: {found} {items[-1].as_json()['patterns']}", flush=True)
            result = {name: [item.as_json() for item in items] for name, items in runs.items()}
            options.output.write_text(json.dumps({"options": vars(options), "runs": result}, default=str) + "\n")
    titles = ["strategy", "patterns", "layer-tokens", "seconds", *map(str, columns)]
    show(titles, rows(runs, columns, data, options.against))
    if len(next(iter(runs.values()))) > 1:
        show(["over seeds", "layer-tokens", *map(str, columns)], rows_over_seeds(runs, columns, data, options.against))
    if options.model.startswith("sim:") and options.against in runs and len(runs[options.against]) > 1:
        show(["over models", *map(str, retain)], rows_over_models(runs, retain, options.against))


def show(titles: Sequence[str], table: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(titles) + " |\n|---" + "|---:" * (len(titles) - 1) + "|")
    for cells in table:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
