"""The dashboard and the alerts of docs/deploy: read by Grafana's and Prometheus' own tools, of metrics that exist."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from indexcache_watch.drift import DriftTest
from indexcache_watch.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
ALERTS, DASHBOARD = DEPLOY / "alerts.yaml", DEPLOY / "dashboard.json"
PROMTOOL = shutil.which("promtool")
assert PROMTOOL or not os.environ.get("INDEXCACHE_REQUIRE_PROMTOOL")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
NAME = re.compile(r"\b(?:sglang:|indexcache_watch_)[a-z_]+")


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(PROMTOOL), *map(str, words)], capture_output=True, text=True)


def lost(given: Any, read: Any, place: str = "") -> list[str]:
    """What of the dashboard Grafana's own types don't read, or read otherwise; defaults that they add are no loss."""
    if isinstance(given, dict) and isinstance(read, dict):
        found = [f"{place}/{name}" for name in given if name not in read]
        return found + [
            line for name in given.keys() & read.keys() for line in lost(given[name], read[name], f"{place}/{name}")
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [
            line
            for number, pair in enumerate(zip(given, read, strict=True))
            for line in lost(*pair, f"{place}/{number}")
        ]
    return [] if given == read and type(given) is type(read) else [place]


def read_by_grafana(content: Any) -> Any:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(content)))


def test_grafanas_own_types_read_all_of_the_dashboard() -> None:
    content = json.loads(DASHBOARD.read_text())
    assert lost(content, read_by_grafana(content)) == []
    panels = content["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or (panel["description"] and panel["targets"])
    spoilt = json.loads(DASHBOARD.read_text().replace('"legendFormat"', '"legendformat"', 1))
    assert lost(spoilt, read_by_grafana(spoilt)) == ["/panels/1/targets/0/legendformat"]


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@needs_promtool
def test_prometheus_understands_the_alerts_and_every_query(tmp_path: Path) -> None:
    assert promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS).returncode == 0
    filled = [query.replace("$__rate_interval", "5m").replace("$model", "a") for query in queries()]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(filled)]
    path = tmp_path / "queries.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = promtool("check", "rules", path)
    assert result.returncode == 0 and f"{len(rules)} rules found" in result.stdout, result.stdout + result.stderr
    path.write_text(path.read_text().replace("sum(", "sum((", 1))
    assert promtool("check", "rules", path).returncode != 0


SERVER = 'instance="a", model_name="m"'
FIRING = {  # series that raise one alert, and series of the same metrics that don't
    "IndexcacheNotProven": ([f"sglang:indexcache_info{{{SERVER}}} 0x90"], [f"sglang:indexcache_info{{{SERVER}}} 1x90"]),
    "IndexcacheWithoutPattern": (
        [f"sglang:num_running_reqs{{{SERVER}}} 1x90"],
        [f"sglang:num_running_reqs{{{SERVER}}} 1x90", f"sglang:indexcache_info{{{SERVER}}} 1x90"],
    ),
    "IndexcacheServersDiffer": (
        [f'sglang:indexcache_info{{{SERVER}, fingerprint="{name}"}} 1x90' for name in "xy"],
        [f'sglang:indexcache_info{{{SERVER}, fingerprint="x"}} 1x90'],
    ),
    "IndexcacheWatchBreached": (
        ['indexcache_watch_breached{instance="w", bucket="1-2048"} 0x85 1x2 _x3'],  # it ends after a while
        ['indexcache_watch_breached{instance="w", bucket="1-2048"} 0x90'],
    ),
    "IndexcacheWatchStale": (
        ['indexcache_watch_last_request_timestamp_seconds{instance="w"} 60x90'],
        ['indexcache_watch_last_request_timestamp_seconds{instance="w"} 60+60x90'],
    ),
    "IndexcacheWatchAbsent": ([], ["indexcache_watch_info 1x90"]),
    "IndexcacheWatchSkips": (
        ['indexcache_watch_skipped_total{instance="w"} 0+2x90', 'indexcache_watch_requests{instance="w"} 0+1x90'],
        ['indexcache_watch_skipped_total{instance="w"} 0+2x90', 'indexcache_watch_requests{instance="w"} 0+4x90'],
    ),
    "IndexcacheWatchOutage": (
        ['indexcache_watch_outage_seconds_total{instance="w"} 0+30x90'],
        ['indexcache_watch_outage_seconds_total{instance="w"} 0+1x90'],
    ),
    "SglangQueue": ([f"sglang:num_queue_reqs{{{SERVER}}} 20x90"], [f"sglang:num_queue_reqs{{{SERVER}}} 0 90 0x90"]),
    "SglangSlowFirstToken": (
        [
            f'sglang:time_to_first_token_seconds_bucket{{{SERVER}, le="{le}"}} 0+{step}x90'
            for le, step in ((10, 0), (20, 9), ("+Inf", 9))
        ],
        [
            f'sglang:time_to_first_token_seconds_bucket{{{SERVER}, le="{le}"}} 0+{step}x90'
            for le, step in ((10, 9), (20, 9), ("+Inf", 9))
        ],
    ),
    "SglangCacheFull": ([f"sglang:token_usage{{{SERVER}}} 1x90"], [f"sglang:token_usage{{{SERVER}}} 0.9x90"]),
    "SglangAborts": (
        [f"sglang:num_aborted_requests_total{{{SERVER}}} 0+1x90", f"sglang:num_requests_total{{{SERVER}}} 0+9x90"],
        [f"sglang:num_aborted_requests_total{{{SERVER}}} 0+1x90", f"sglang:num_requests_total{{{SERVER}}} 0+90x90"],
    ),
}


@needs_promtool
def test_each_alert_is_raised_when_it_should_and_only_then(tmp_path: Path) -> None:
    names = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert names == list(FIRING)
    for name, cases in FIRING.items():
        for raised, lines in zip((True, False), cases, strict=True):
            series = [
                {"series": line.rpartition("}")[0] + "}" if "}" in line else line.split()[0], "values": values_of(line)}
                for line in lines
            ]
            test = {
                "interval": "1m",
                "input_series": series,
                "alert_rule_test": [{"eval_time": "90m", "alertname": name, "exp_alerts": []}],
            }
            path = tmp_path / f"{name}-{raised}.yaml"
            path.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
            result = promtool("test", "rules", path)
            assert (result.returncode != 0) == raised, f"{name}: {result.stdout}{result.stderr}"
            assert not raised or f'alertname="{name}"' in result.stderr + result.stdout


def values_of(line: str) -> str:
    """The values of a series, behind its name and labels."""
    return (line.rpartition("}")[2] if "}" in line else line.partition(" ")[2]).strip()


def used() -> set[str]:
    names = set(NAME.findall(" ".join(queries()) + ALERTS.read_text()))
    return {name.removesuffix("_bucket") for name in names}


def test_every_metric_of_a_watch_is_described() -> None:
    families = Metrics(DriftTest((10,), 0.1, 0.01), 0.1, served="").registry.collect()
    page = (DEPLOY.parent / "reference" / "metrics.md").read_text()
    for family in families:
        name = family.name.removesuffix("_stderr") + ("_total" if family.type == "counter" else "")
        assert f"`{name}" in page, name


def test_metrics_of_ours_exist() -> None:
    families = Metrics(DriftTest((10,), 0.1, 0.01), 0.1, served="").registry.collect()
    ours = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert {name for name in used() if name.startswith("indexcache_watch_")} <= ours
    source = (DEPLOY.parents[1] / "sglang_indexcache" / "serving" / "metrics.py").read_text()
    for name in used():
        assert not name.startswith("sglang:indexcache_") or f'"{name.removesuffix("_total")}"' in source, name


@pytest.mark.sglang
@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_metrics_of_sglang_exist() -> None:
    [folder] = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr, misc]
    source = (Path(folder) / "srt" / "observability" / "metrics_collector.py").read_text()
    for name in used():
        if name.startswith("sglang:") and not name.startswith("sglang:indexcache_"):
            assert f'"{name}"' in source, name
