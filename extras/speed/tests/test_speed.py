"""Speed: turns, timed requests, estimates, and indexcache-eval --speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from indexcache_search import SpeedOptions, evaluate
from indexcache_search.cli.evaluate import app
from indexcache_search.errors import SearchError
from indexcache_search.eval import speeds
from indexcache_search.results.schema import SpeedRow
from indexcache_search.results.variant import BASELINE, NAMED, Variant
from indexcache_search.strategies.budget.table import LatencyTable
from indexcache_speed.estimate import estimated, prices_at
from indexcache_speed.servers import check
from indexcache_speed.timed_request import OPENING, Burst, Timing, send
from indexcache_speed.turns import Load, Prompts, Timed, interval, measured
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe
from sglang_indexcache.http.address import Address
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.redaction import KEY_VARIABLE
from tests.search.streaming import Events, StreamingStub, tokens_of

POOL = np.arange(1000, dtype=np.int32)


# -- turns


def timed(name: str, seconds: list[float], log: list[tuple[str, Prompts]]) -> Timed:
    """Something whose first token takes `seconds` in each turn, the warm-up included, and later ones a tenth."""
    left = iter(seconds)

    def send(prompts: Prompts, output_tokens: int) -> Burst:
        log.append((name, [list(prompt) for prompt in prompts]))
        first = next(left)
        later = output_tokens - 1
        timings = tuple(
            Timing(first * (1 + 0.1 * at), first * (1 + 0.1 * at + 0.1 * later), later) for at in range(len(prompts))
        )
        return Burst(timings, max(timing.last for timing in timings))

    return Timed(Variant(BASELINE if name == "a" else NAMED, name, None, None), send)


def test_medians_and_gains_are_of_the_turns_after_the_first() -> None:
    load = Load(context=100, output_tokens=11, turns=5)
    a, b = measured([timed("a", [99, 2, 4, 2, 2, 2], []), timed("b", [77, 1, 1, 2, 1, 1], [])], load, POOL, "here")
    assert (a.first_token_ms.median, a.first_token_ms.low, a.first_token_ms.high) == (2000, 2000, 4000)
    assert a.token_ms is not None and a.token_ms.median == pytest.approx(200)
    assert b.tokens_per_second is not None and b.tokens_per_second.median == pytest.approx(11 / 2)
    assert a.gain is None and b.gain is not None and b.gain.throughput is not None
    for gain in (b.gain.first_token, b.gain.throughput):
        assert (gain.median, gain.low, gain.high) == (2.0, 1.0, 4.0)
    assert (b.turns, b.output_tokens, b.context, b.concurrency, b.source, b.basis) == (
        5,
        11,
        100,
        1,
        "measured",
        "here",
    )
    assert b.first_token_percentiles is None


def test_one_token_has_a_first_token_alone() -> None:
    load = Load(context=100, output_tokens=1, turns=5)
    _, row = measured([timed(name, [1.0] * 6, []) for name in "ab"], load, POOL, "")
    assert row.token_ms is row.tokens_per_second is None
    assert row.gain is not None and row.gain.token is row.gain.throughput is None


def test_requests_at_once_have_percentiles_and_count_together() -> None:
    load = Load(context=100, concurrency=4, output_tokens=11, turns=5)
    _, row = measured([timed(name, [1.0] * 6, []) for name in "ab"], load, POOL, "")
    assert row.first_token_ms.median == pytest.approx(1150)
    assert row.first_token_percentiles is not None and set(row.first_token_percentiles) == {"90", "99"}
    assert 1200 < row.first_token_percentiles["90"] <= row.first_token_percentiles["99"] <= 1300
    assert row.tokens_per_second is not None and row.tokens_per_second.median == pytest.approx(44 / 2.3, rel=1e-3)


def test_turns_alternate_and_prompts_are_new_but_for_what_is_compared() -> None:
    log: list[tuple[str, Prompts]] = []
    load = Load(context=100, concurrency=2, output_tokens=3, turns=5)
    measured([timed("a", [1.0] * 6, log), timed("b", [1.0] * 6, log)], load, POOL, "")
    assert "".join(name for name, _ in log) == "baabbaabbaab"
    openings = {tuple(prompt[:OPENING]) for _, prompts in log for prompt in prompts}
    assert len(openings) == 24  # a prefix cache never has the first tokens
    for first, second in zip(log[::2], log[1::2], strict=True):
        assert [prompt[OPENING:] for prompt in first[1]] == [prompt[OPENING:] for prompt in second[1]]
    assert len({tuple(prompt[OPENING:]) for _, prompts in log for prompt in prompts}) == 12
    assert {len(prompt) for _, prompts in log for prompt in prompts} == {100}


@pytest.mark.parametrize("count", range(5, 30))
def test_the_interval_is_the_narrowest_of_the_sign_test(count: int) -> None:
    low, high = interval([float(value) for value in range(count)])
    assert high == count - 1 - low

    def missed(place: float) -> float:  # probability that the true median is outside
        return 2 * sum(math.comb(count, below) for below in range(int(place) + 1)) / 2**count

    assert missed(low) <= 1 / 16 < missed(low + 1)


# -- requests


@pytest.fixture
def stubs() -> Iterator[list[StreamingStub]]:
    made = [StreamingStub(), StreamingStub()]
    yield made
    for stub in made:
        stub.close()


def ask(stub: StreamingStub, **more: Any) -> Burst:
    return send(Address.of(stub.url), [[1, 2, 3], [4, 5, 6]], 8, **more)


def test_requests_are_streamed_greedily_past_the_end_of_the_text(stubs: list[StreamingStub]) -> None:
    burst = ask(stubs[0], dp_rank=1, key="secret-key")
    assert [timing.later for timing in burst.timings] == [7, 7]
    assert all(0 < timing.first <= timing.last <= burst.seconds for timing in burst.timings)
    assert sorted(stubs[0].prompts()) == [[1, 2, 3], [4, 5, 6]]
    for _, body, authorization in stubs[0].asked:
        assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        assert body["stream"] is True and body["routed_dp_rank"] == 1 and authorization == "Bearer secret-key"


def test_tokens_that_come_together_are_counted(stubs: list[StreamingStub]) -> None:
    def in_threes(body: dict[str, Any]) -> Events:
        every = list(tokens_of(body))
        yield from (every[2], every[5], every[7], every[8])

    stubs[0].events = in_threes
    assert [timing.later for timing in ask(stubs[0]).timings] == [5, 5]


def test_tokens_may_come_slowly(stubs: list[StreamingStub], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other answers have to be whole soon after they have begun."""
    monkeypatch.setattr("sglang_indexcache.http.connection.BEGUN_SECONDS", -1.0)

    def slowly(body: dict[str, Any]) -> Events:
        for event in tokens_of(body):
            time.sleep(0.01)
            yield event

    stubs[0].events = slowly
    assert [timing.later for timing in ask(stubs[0]).timings] == [7, 7]
    with pytest.raises(IndexCacheError, match="no whole answer"):
        check([Address.of(stubs[0].url)], [Load(context=64, output_tokens=2, turns=5)])


def changed(number: int, **meta: Any) -> Callable[[dict[str, Any]], Events]:
    """Events of which one says something else."""

    def events(body: dict[str, Any]) -> Events:
        for at, event in enumerate(tokens_of(body)):
            if at == number and not isinstance(event, str):
                event["meta_info"] |= meta
            yield event

    return events


def cut(body: dict[str, Any]) -> Events:
    yield from list(tokens_of(body))[:5]


def fewer(body: dict[str, Any]) -> Events:
    yield from [*list(tokens_of(body))[:5], "[DONE]"]


ABORT = {"type": "abort", "message": "out of memory"}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (fewer, "gave 5 tokens, expected the 8 requested"),
        (cut, "its events end without [DONE]"),
        (lambda body: iter(["[DONE]"]), "gave 0 tokens"),
        (changed(7, cached_tokens=2048), "took 2048 tokens of a new prompt from its cache"),
        (changed(2, finish_reason=ABORT), "ended a request with abort: out of memory"),
        (changed(2, completion_tokens="3"), "streams another form: meta_info.completion_tokens"),
        (lambda body: iter([{"error": {"message": "too long"}}, "[DONE]"]), "/generate answers: too long"),
        (lambda body: iter([{"text": ""}, "[DONE]"]), "no meta_info"),
        (lambda body: iter(["{", "[DONE]"]), "no JSON"),
        (404, "has no /generate, expected an SGLang server"),
        (500, "/generate answers 500"),
        (401, f"expected the key in {KEY_VARIABLE}"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_answers_that_are_no_measurement(stubs: list[StreamingStub], events: Any, message: str) -> None:
    stubs[0].events = events
    with pytest.raises(IndexCacheError) as caught:
        ask(stubs[0])
    assert message in str(caught.value) and str(caught.value).startswith(stubs[0].url)


# -- estimates

GLM_5 = describe({"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 4, "index_topk": 2048}, "GLM-5")


def test_an_estimate_is_the_sum_of_the_layers_in_the_table() -> None:
    table = LatencyTable.load("glm-5-tp8")
    lines = [Variant.baseline(Pattern("FFFF")), Variant(NAMED, "a", None, Pattern("FSSS"))]
    native, row = estimated(lines, prices_at(GLM_5, [131072], None))
    rest, full, shared = (
        values[-1] for values in (table.prompt.rest_ms, table.prompt.full_ms[1], table.prompt.shared_ms[1])
    )
    assert native.first_token_ms.median == pytest.approx(rest + 4 * full, abs=1e-3)
    assert row.first_token_ms.median == pytest.approx(rest + full + 3 * shared, abs=1e-3)
    assert row.gain is not None and native.gain is None
    assert row.gain.first_token.median == pytest.approx((rest + 4 * full) / (rest + full + 3 * shared), abs=1e-4)
    assert row.source == "estimated" and "4 layers of glm-5-tp8 (8 heads a rank" in row.basis
    assert row.first_token_ms.low is row.turns is row.output_tokens is None


def test_what_has_no_price_has_no_estimate() -> None:
    lines = [Variant.baseline(Pattern("FFFF")), Variant(NAMED, "a", None, Pattern.parse("FSSS+0q64"))]
    [prices] = prices_at(GLM_5, [16384], "glm-5-dp")
    assert [row.name for row in estimated(lines, [prices])] == ["baseline", "a"]
    without = replace(prices, full={1: prices.full[1]})
    assert [row.name for row in estimated(lines, [without])] == ["baseline"]
    with pytest.raises(SearchError, match="no latency table is known for DeepseekV4ForCausalLM, expected prices="):
        prices_at(replace(GLM_5, architecture="DeepseekV4ForCausalLM"), [16384], None)
    with pytest.raises(
        SearchError, match="8192 tokens are outside of the latency table glm-5-tp8, expected 16384 to 131072"
    ):
        prices_at(GLM_5, [8192], None)


# -- indexcache-eval


def run(*options: str | Path) -> Any:
    return CliRunner().invoke(app, [*map(str, options)], env={"COLUMNS": "200"})


def of_servers(stubs: list[StreamingStub], output: Path) -> list[str]:
    urls = [option for stub in stubs for option in ("--endpoint", stub.url)]
    return [*urls, "--evaluation", "demo:copy", "--num-sequences", "1", "--output", str(output)]


def rows_of(output: Path) -> list[SpeedRow]:
    return [SpeedRow.model_validate(row) for row in json.loads((output / "eval.json").read_text())["speed"]]


def test_the_speed_of_servers_stands_beside_their_loss(stubs: list[StreamingStub], tmp_path: Path) -> None:
    result = run(*of_servers(stubs, tmp_path), "--speed", "64,96:output_tokens=4", "--concurrency", "3")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path)
    names = ["baseline", stubs[1].url]
    assert [(row.context, row.concurrency, row.name) for row in rows] == [
        (context, number, name) for context in (64, 96) for number in (1, 3) for name in names
    ]
    assert {(row.source, row.turns, row.output_tokens) for row in rows} == {("measured", 5, 4)}
    assert [row.gain is None for row in rows] == [True, False] * 4
    assert "Speed beside loss: measured, median of 5 turns" in result.stdout and "tokens/s" in result.stdout
    page = (tmp_path / "eval.html").read_text()
    assert "<h2>Speed</h2>" in page and page.count(f">{stubs[1].url}</th>") == 5
    lengths = [len(prompt) for prompt in stubs[0].prompts()]
    assert lengths == [64] * 6 + [64] * 18 + [96] * 6 + [96] * 18


def test_one_server_may_be_both(stubs: list[StreamingStub], tmp_path: Path) -> None:
    options = of_servers([stubs[0], stubs[0]], tmp_path)
    options[3] += "/v1"  # the prefix of OpenAI's protocol
    result = run(*options, "--speed", "64:output_tokens=2")
    assert result.exit_code == 0, result.output
    prompts = stubs[0].prompts()
    assert len({tuple(prompt[:OPENING]) for prompt in prompts}) == len(prompts) == 12


def test_without_speed_nothing_is_timed(stubs: list[StreamingStub], tmp_path: Path) -> None:
    result = run(*of_servers(stubs, tmp_path))
    assert result.exit_code == 0 and "Speed beside loss" not in result.stdout
    assert "speed" not in json.loads((tmp_path / "eval.json").read_text()) and not stubs[0].prompts()
    assert "<h2>Speed</h2>" not in (tmp_path / "eval.html").read_text()


def test_prompts_without_room_are_refused_before_anything_runs(stubs: list[StreamingStub], tmp_path: Path) -> None:
    stubs[1].room = 127
    result = run(*of_servers(stubs, tmp_path), "--speed", "64,96:output_tokens=32")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    expected = f"--speed: {stubs[1].url} has room for 127 tokens, expected 96 of a prompt and 32 generated"
    assert expected in result.stderr and not stubs[0].asked and not (tmp_path / "eval.json").exists()


def test_what_was_measured_before_a_failure_is_kept(stubs: list[StreamingStub], tmp_path: Path) -> None:
    def short_of_some(body: dict[str, Any]) -> Events:
        return fewer(body) if len(body["input_ids"]) == 96 else tokens_of(body)

    stubs[1].events = short_of_some
    result = run(*of_servers(stubs, tmp_path), "--speed", "64,96:output_tokens=8")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output
    assert f"{stubs[1].url}: gave 5 tokens, expected the 8 requested; what was measured before is in" in result.stderr
    assert [row.context for row in rows_of(tmp_path)] == [64, 64]
    assert len(json.loads((tmp_path / "eval.json").read_text())["held_out"]["rows"]) == 2


def of_patterns(model: Path, data: Path, output: Path) -> list[str | Path]:
    fixed = ["--model", model, "--evaluation", data, "--seq-len", "32", "--num-sequences", "4", "--device", "cpu"]
    return [*fixed, "--pattern", "a=FSSFSS", "--pattern", "b=FFFFFS", "--no-uniform", "--output", output]


def test_the_speed_of_patterns_is_estimated_and_says_so(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    options = of_patterns(model_folder, token_file, tmp_path / "out")
    result = run(*options, "--speed", "16384,131072:prices=deepseek-v3.2-tp8")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "out")
    assert [(row.context, row.name) for row in rows] == [
        (context, name) for context in (16384, 131072) for name in ("baseline", "a", "b")
    ]
    assert {row.source for row in rows} == {"estimated"} and all("deepseek-v3.2-tp8" in row.basis for row in rows)
    assert "Speed beside loss: estimated; times of 6 layers of deepseek-v3.2-tp8" in result.stdout
    assert "--speed: reckoned as deepseek-v3.2-tp8, which this model is not: 4 attention heads" in result.stderr
    assert "128K: prefill speed for as many tokens, by the times of deepseek-v3.2-tp8" in result.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--speed", "32768:turns=7"], "--speed needs --endpoint for output_tokens and turns"),
        (["--speed", "32768:output_tokens=7"], "--speed needs --endpoint for output_tokens and turns"),
        (["--speed", "32768", "--concurrency", "2"], "--concurrency needs --endpoint"),
        (["--concurrency", "2"], "--concurrency needs --speed"),
        (["--speed", "32768,32768"], "expected each once"),
        (["--speed", "7"], "found 7, expected 64"),
        (["--speed", "long"], "found 'long', expected a whole number"),
        (["--speed", "32768:turns=4"], "turns: found 4, expected 5 to 1000"),
        (
            ["--speed", "8192:prices=glm-5-tp8"],
            "8192 tokens are outside of the latency table glm-5-tp8, expected 16384 to 131072",
        ),
        (["--speed", "32768:prices=nowhere"], "prices: nowhere"),
        (["--speed", "32768"], "the times of glm-5-tp8 (8 heads a rank, 32 index heads, index_topk 2048, bfloat16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_get_one_line(
    model_folder: Path, token_file: Path, tmp_path: Path, more: list[str], message: str
) -> None:
    result = run(*of_patterns(model_folder, token_file, tmp_path / "out"), *more)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert len([line for line in result.stderr.splitlines() if line.strip()]) == 1


def test_prices_are_for_patterns(stubs: list[StreamingStub], tmp_path: Path) -> None:
    result = run(*of_servers(stubs, tmp_path), "--speed", "64:prices=glm-5-dp")
    assert result.exit_code == 2 and "--speed needs patterns, without --endpoint, for prices" in result.stderr


@pytest.mark.parametrize("command", [True, False], ids=["option", "Python"])
def test_without_the_extension_speed_is_refused(
    command: bool, model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command:
        code = "import sys; import importlib.metadata as m; old = m.entry_points;"
        code += "m.entry_points = lambda **by: [e for e in old(**by) if not e.value.startswith('indexcache_speed.')];"
        code += "from indexcache_search.__main__ import evaluate; sys.argv[1:] = ['--speed', '64']; evaluate()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "'--speed': needs an extension that is not installed" in done.stderr
        return
    monkeypatch.setattr(speeds, "extensions", lambda group, kind: {})
    asked: dict[str, Any] = {"model": model_folder, "evaluation": token_file, "patterns": "FSSFSS", "seq_len": 32}
    with pytest.raises(SearchError, match="--speed needs an extension that is not installed"):
        evaluate(output=tmp_path, speed=SpeedOptions(contexts=(64,)), **asked)
