"""Engines by name: what `--engine` takes, and which one evaluates a model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from indexcache_search.cli.engines import EngineChoice, engine_option
from indexcache_search.engines import registry
from indexcache_search.engines.registry import EngineKind, kind_of, kinds
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import describe_model


@dataclass(frozen=True, kw_only=True)
class FastSettings:
    threads: int | None = None


FAST = EngineKind(
    name="fast",
    settings=FastSettings,
    load=lambda model, run, around: nullcontext(run),  # type: ignore[arg-type]
    runs=lambda model: model.dense,
)


@pytest.fixture
def with_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_extras", lambda: (FAST,))


def parsed(value: Any, servers: bool = True) -> EngineChoice:
    found: EngineChoice = engine_option("", servers=servers).parser(value)
    return found


def test_an_extra_brings_its_engine_with_its_settings(with_fast: None) -> None:
    assert [kind.name for kind in kinds()] == ["fast", "transformers", "sglang"]
    for value in ("fast:threads=3", "name=fast,threads=3", {"name": "fast", "threads": 3}):
        assert parsed(value) == EngineChoice(FAST, {"threads": 3})
    run = parsed("fast:threads=3").run({"threads": 2, "prefix_cache_gb": 1.0}, device="cpu")
    assert (run.engine, run.own, run.device) == ("fast", {"threads": 3}, "cpu")
    assert parsed("fast").run({"threads": 2}).own == {"threads": 2}
    assert "threads" in EngineChoice.settable()


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("slow", "name: found 'slow', expected one of fast, transformers, sglang"),
        ("sglang:attention=naive", "attention needs transformers"),
        ("transformers:threads=3", "threads needs fast"),
        ("nope=3", "found 'nope', expected name, attention, prefix_cache_gb"),
        ("attention=quick", "attention: found 'quick', expected one of auto, naive, kernels"),
        ("prefix_cache_gb=-1", "prefix_cache_gb: found -1, expected 0 to 1e+06"),
        ("prefix_cache_gb=nan", "prefix_cache_gb: found nan, expected 0 to 1e+06"),
    ],
)
def test_what_an_engine_does_not_take(with_fast: None, value: str, line: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parsed(value)
    assert caught.value.message == line


def test_engines_on_servers_are_offered_to_the_search_alone() -> None:
    with pytest.raises(typer.BadParameter, match="expected one of transformers"):
        parsed("sglang", servers=False)


def test_the_first_engine_of_a_name_that_runs_the_model_is_taken(
    monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    model = describe_model(str(model_folder))
    never = replace(FAST, name="transformers")
    always = replace(never, runs=lambda model: True)
    for extra, taken in ((never, False), (always, True)):
        monkeypatch.setattr(registry, "_extras", lambda extra=extra: (extra,))
        assert (kind_of("transformers", model) is extra) == taken
    monkeypatch.setattr(registry, "_extras", lambda: (FAST,))
    with pytest.raises(SearchError, match=r"--engine fast does not search .*; expected transformers or sglang"):
        kind_of("fast", model)
