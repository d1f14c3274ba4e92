"""metrics.json of a finished search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexcache_search.engines.base import Engine
from indexcache_search.results.schema import CostResult, HeldOut, SearchResult, SpeedRow, StepResult
from indexcache_search.searching.search import Found
from sglang_indexcache import PatternFile

SCHEMA = "indexcache-search/metrics/v3"


def collect(
    found: Found,
    *,
    file: PatternFile,
    engine: Engine,
    table: HeldOut,
    matrices: Mapping[str, NDArray[np.float64] | None],
    seconds: Mapping[str, float],
    speed: Sequence[SpeedRow] = (),
) -> SearchResult:
    """Collect the result of a finished search.

    Args:
        found: its outcome.
        file: the pattern file made of it.
        engine: the one that evaluated.
        table: the held-out comparison.
        matrices: `overlap` and `similarity`, `[layers, layers]`; `None` if not measured.
        seconds: wall time of each phase of this run.
        speed: rows of speed, if the engine measures it.
    """
    more: dict[str, Any] = {name: None if item is None else item.round(4).tolist() for name, item in matrices.items()}
    if speed:
        more["speed"] = list(speed)
    return SearchResult(
        schema=SCHEMA,
        pattern_file=file,
        engine={"name": engine.name, **engine.settings},
        weights_sha256=engine.weights_sha256,
        seconds={name: round(value, 1) for name, value in seconds.items()},
        cost=CostResult(
            **{**asdict(found.cost), "seconds": round(found.cost.seconds, 1)},
            algorithm_1_layer_tokens=found.algorithm_1,
            share_of_algorithm_1=found.cost.layer_tokens / max(found.algorithm_1, 1),
        ),
        steps=_steps(found),
        held_out=table,
        look_alikes=[str(item) for item in found.look_alikes],
        **more,
    )


def _steps(found: Found) -> list[StepResult]:
    return [
        StepResult(
            layer=step.layer,
            full_layers=len(step.pattern.full_layers),
            pattern=step.pattern.roles,
            loss=step.loss,
            increase=found.increases[step.pattern],
            candidates={str(layer): value for layer, value in step.losses.items()},
        )
        for step in found.steps
    ]
