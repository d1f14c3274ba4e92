"""What published patterns gain, by tables of whole models, or of layers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexcache_published import gains
from indexcache_published.known import known_patterns
from indexcache_search.strategies.budget import pricing
from indexcache_search.strategies.budget.table import LatencyTable
from sglang_indexcache import Pattern
from tests.search.made_tables import whole_table
from tests.search.test_whole_models import written


def test_published_patterns_have_the_gain_of_a_whole_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = LatencyTable.load(written(whole_table(), tmp_path))
    layers = LatencyTable.load("glm-5-tp8")
    for known in known_patterns():
        native = Pattern.full(78)
        full = len(known.pattern.full_layers)
        prices = table.at(4000)
        ratio = prices.prompt_ms(native) / (prices.rest + full * prices.full[1] + (78 - full) * prices.shared[1])
        line = gains.line_of(table, known.pattern)
        assert f", {ratio:.2f}x at 4,000; decode " in line and line.endswith(str(table))
        assert gains.tables_for("GlmMoeDsaForCausalLM", known.pattern)
        assert "layers alone" in gains.line_of(layers, known.pattern)


def test_tables_of_whole_models_go_before_those_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: LatencyTable.load(name) for name in ("glm-5-tp8", "glm-5-dp")}
    made["made"] = LatencyTable.model_validate(whole_table())
    monkeypatch.setattr(pricing, "known", lambda: list(made))
    for module in (gains, pricing):
        monkeypatch.setattr(module, "LatencyTable", type("Loaded", (), {"load": staticmethod(made.__getitem__)}))
    pattern = known_patterns()[0].pattern
    assert [table.name for table in gains.tables_for("GlmMoeDsaForCausalLM", pattern)] == ["made"]
    del made["made"]
    assert [table.name for table in gains.tables_for("GlmMoeDsaForCausalLM", pattern)] == ["glm-5-tp8"]
