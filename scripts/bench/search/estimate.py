"""How good an estimate is, by the length of the beginning that it rests on: replays the journal of a finished search.

    python -m scripts.bench.search.estimate FOLDER      # --output of a finished `indexcache-search` on the demo

Nothing runs: the estimate gets the evaluations of the first seconds, and is compared with the time that all took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from indexcache_forecast import forecast
from indexcache_forecast.stand_in import Pace
from indexcache_search import demo
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.hf.loading import describe_model
from indexcache_search.searching.begin import Begun, token_sets
from indexcache_search.searching.job import SearchData
from indexcache_search.searching.settings import Settings
from indexcache_search.strategies import strategy_of
from scripts.tools.recorded import recorded

BEGINNINGS = (10, 20, 40, 60)  # seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    journal = parser.parse_args().folder / "work" / "journal.jsonl"
    model = describe_model(str(demo.MODEL))
    data = SearchData(
        calibration=tuple(demo.CALIBRATION),
        evaluation=tuple(demo.EVALUATION),
        seq_len=512,
        num_sequences=32,
        num_eval_sequences=demo.SEQUENCES,
    )
    _, calibration, held_out = token_sets(str(demo.MODEL), model, data, 512)
    settings = Settings(retain=(Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)), strategy=strategy_of())
    header, *lines = journal.read_text().splitlines()
    names, evaluations = json.loads(header)["identity"], recorded(journal)
    took = {
        part: sum(item.seconds for name, item in evaluations if name == part) for part in ("calibration", "held-out")
    }
    pace = Pace.fitted([item for name, item in evaluations if name == "calibration"], 512)

    def evaluate(
        patterns: Any, data: Any, objective: Any, rows: Any = None, fresh: bool = False
    ) -> Iterator[Evaluation]:
        """End the beginning; then time the pattern that shares wherever it can, as the whole journal says."""
        if patterns != [model.native.keeping([0])]:
            raise forecast._Enough
        count = len(rows)
        item = Evaluation(
            pattern=patterns[0],
            rows=tuple(rows),
            losses=(0.0,) * count,
            correct=(0,) * count,
            tokens=(1,) * count,
            layer_tokens=(15 * 512,) * count,
            seconds=1.0,
        )
        yield replace(item, seconds=pace.of(item, 512))

    engine: Any = SimpleNamespace(
        name=names["engine"],
        model=model,
        settings={},
        weights_sha256="",
        evaluate=evaluate,
        matrix=lambda name, data, rows: None,
        measures=frozenset({"similarity"}),
        lanes=1,
    )
    print("| beginning | search | took | held out | took |\n| -: | -: | -: | -: | -: |")
    for seconds in BEGINNINGS:
        kept, spent = [header], 0.0
        for line in lines:
            record = json.loads(line)
            if record.get("set") == "calibration" and spent < seconds:
                kept.append(line)
                spent += record["seconds"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / journal.name).write_text("\n".join(kept) + "\n")
            with Journal(Path(folder), names, {}) as kept_journal:
                begun = Begun(settings, settings.goal(model), engine, calibration, held_out, kept_journal)
                found = forecast.forecast_of(begun, seconds=0.0)
        print(
            f"| {spent:.1f} s | {found.search:.1f} s | {took['calibration']:.1f} s | {found.held_out:.1f} s"
            f" | {took['held-out']:.1f} s |"
        )


if __name__ == "__main__":
    main()
