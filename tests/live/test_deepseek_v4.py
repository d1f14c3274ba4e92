"""DeepSeek-V4 in real SGLang: served, proven, switched and refused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sglang")

from typer.testing import CliRunner

from dsa_cpu_platform import recorder
from indexcache_search.cli.search import app
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.engines.transformers import TransformersEngine
from scripts.tools import random_models
from scripts.tools.pattern_files import write_pattern
from scripts.tools.random_models import LAYERS, TOPK, VOCAB
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.check import main as check_main
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.io.messages import NOT_COMBINED, NOT_LOADED, OTHER_LENGTH
from tests.live.ending import changed_source, launch, load
from tests.live.reference import TOLERANCE, load_reference
from tests.live.server import Server, command, ended, running
from tests.live.test_server import PLAIN, check_modes, metric, positions_of, states

pytestmark = pytest.mark.sglang
PAGE = 256  # of DeepSeek-V4's caches
FIRST_DIFFERENCE = 4 * (TOPK + 1) - 1  # the first query that sees more than k entries
CALIBRATE = ("--indexcache-calibrate", "--skip-tokenizer-init", "--chunked-prefill-size", str(PAGE))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.build("deepseek-v4", tmp_path_factory.mktemp("deepseek-v4"))


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module")
def server(model: Path, record: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A calibration server that keeps prefixes, and forgets them with each switch."""
    flags = [flag for flag in CALIBRATE if flag != "--indexcache-calibrate"]
    changes = {"SGLANG_INDEXCACHE_CALIBRATE": "1", "DSA_CPU_BREAK": "prefixes", "DSA_CPU_RECORD": str(record)}
    with running(
        model,
        tmp_path_factory.mktemp("server") / "log",
        *(*flags, "--enable-fp32-lm-head"),
        launcher=PLAIN,
        **changes,
    ) as started:
        yield started


@pytest.fixture(scope="module")
def layers(model: Path) -> tuple[int, ...]:
    return Checkpoint.read(str(model)).model.layers


def patterns() -> list[Pattern]:
    draw = random.Random(4)
    return [Pattern("F" + "".join(draw.choice("FS") for _ in range(LAYERS - 1))) for _ in range(4)]


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (400, 280, 90)]


def check_sources(runs: Sequence[recorder.Run], pattern: Pattern, layers: Sequence[int]) -> int:
    """In each forward pass, F layers chose and S layers attended to what their source chose; how many passes."""
    letter_of, passes = {layer: letter for letter, layer in enumerate(layers)}, 0
    chosen: dict[int, recorder.Run] = {}
    scored: list[int] = []
    for run in runs:
        letter = letter_of[run.layer]
        if run.what == "indexer":
            scored.append(letter)
            chosen[letter] = run
            continue
        source = chosen[pattern.source_layers[letter]]
        assert (run.requests, run.positions) == (source.requests, source.positions)
        assert np.array_equal(run.selected, source.selected), f"letter {letter} attends to something else"
        if letter == LAYERS - 1:
            assert tuple(scored) == pattern.full_layers
            passes, scored, chosen = passes + 1, [], {}
    assert not scored
    return passes


def test_every_pattern_scores_in_f_layers_and_attends_to_their_choice(
    server: Server, record: Path, layers: tuple[int, ...]
) -> None:
    """Four random patterns: prefill in chunks, decode, a batch, a prefix hit; back to all F bit for bit."""
    calibration, full = CalibrationServer(server.url), Pattern.full(LAYERS)
    whole = {}
    for pattern in (full, *patterns(), full):
        calibration.switch(pattern)
        recorder.clear(record)
        server.generate(prompts(), [f"{pattern} {index}" for index in range(3)], steps=4)
        [(alone, _)] = server.generate(prompts()[1:2], ["alone"], steps=4)  # whose passes hold nothing else
        server.generate(prompts()[:1], ["first"], steps=2, inputs=False)
        [(_, cached)] = server.generate(prompts()[:1], ["again"], steps=2, inputs=False)
        assert cached >= PAGE
        runs = recorder.read(record)
        assert check_sources(runs, pattern, layers) >= 16
        again = [positions_of(run, "again") for run in runs if "again" in run.requests]
        assert min(map(min, again)) == cached, "the prefix was computed again"
        assert any(len(set(run.requests)) > 1 for run in runs if run.mode == "DECODE"), "no batch in decode"
        if pattern in whole:
            assert alone == whole[pattern], "switching back changed something"
        whole[pattern] = alone
    for pattern in patterns():
        if pattern == full:
            continue
        apart = np.abs(np.subtract(whole[full].logprobs, whole[pattern].logprobs))
        assert apart[:FIRST_DIFFERENCE].max() <= TOLERANCE, "without a choice all patterns are equal"
        assert apart[FIRST_DIFFERENCE : FIRST_DIFFERENCE + 8].max() > 10 * TOLERANCE, "behind that they are not"


def tokens() -> TokenSet:
    ids = np.random.default_rng(0).integers(2, VOCAB, (2, PAGE)).astype(np.int32)
    return TokenSet(ids, np.broadcast_to(np.arange(PAGE) > 4 * TOPK, ids.shape).copy(), np.zeros(2, int), ("random",))


def test_live_losses_are_those_of_transformers(model: Path, server: Server) -> None:
    """nll and kl over the control route, overlap, and the server's own switches."""
    data, reference = tokens(), TransformersEngine.load(str(model), "cpu")
    engine = SglangEngine([CalibrationServer(server.url)], reference.model, patience=60)
    tried = [Pattern.full(LAYERS), *patterns()[:2], Pattern("FSSSSS")]
    for objective in ("nll", "kl"):
        found, wanted = (
            {item.pattern: item.losses for item in one.evaluate(tried, data, objective)} for one in (engine, reference)
        )
        for pattern in tried:
            assert found[pattern] == pytest.approx(wanted[pattern], rel=1e-3, abs=1e-9)
    assert found[Pattern.full(LAYERS)] == (0.0, 0.0) and min(found[Pattern("FSSSSS")]) > 0.01
    overlap = engine.matrix("overlap", data, 16)
    assert overlap is not None and np.abs(overlap - reference.matrix("overlap", data, 16)).max() <= 1 / TOPK


def test_a_search_on_the_live_server(model: Path, server: Server, tmp_path: Path) -> None:
    """The command line finds on SGLang what it finds on transformers, and its file is for this model."""
    rows = np.random.default_rng(5).integers(2, VOCAB, (6, PAGE)).tolist()
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    found = {}
    for name, engine in (("live", ("--engine", "sglang", "--endpoint", server.url)), ("plain", ("--device", "cpu"))):
        arguments = [
            *("--model", str(model), *engine, "--strategy", "greedy"),
            *("--calibration", str(tmp_path / "tokens.jsonl"), "--evaluation", str(tmp_path / "tokens.jsonl")),
            *("--seq-len", str(PAGE), "--num-sequences", "2", "--num-eval-sequences", "1", "--retain", "1/2"),
            *("--output", str(tmp_path / name)),
        ]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found[name] = PatternFile.load(tmp_path / name / "pattern.yaml")
    assert found["live"].pattern == found["plain"].pattern and found["live"].pattern.count("F") == 3
    assert found["live"].model.architecture == "DeepseekV4ForCausalLM" and found["live"].model.num_layers == LAYERS
    assert check_main([str(tmp_path / "live" / "pattern.yaml"), "--model", str(model)]) == 0


def test_two_ranks_serve_and_prove_it(model: Path, tmp_path: Path, layers: tuple[int, ...]) -> None:
    """Parity with transformers, status, metrics and indexcache-check of a server with two tensor-parallel ranks."""
    record = tmp_path / "record"
    record.mkdir()
    pattern = Pattern("FSSFFS")
    file = write_pattern(pattern, model, tmp_path / "pattern.yaml")
    flags = ("--indexcache-pattern", file, "--chunked-prefill-size", str(PAGE), "--tp-size", "2", "--enable-metrics")
    changes = {"DSA_CPU_RECORD": str(record), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with running(model, tmp_path / "log", *flags, "--skip-tokenizer-init", **changes) as server:
        asked = [prompts()[0][: PAGE + 50], *(prompts()[2][:length] for length in (90, 40))]
        check_modes(server, load_reference(model), pattern, record, asked)
        assert "on 6 attention modules here and 2 rank(s)" in server.log.read_text()
        [state] = states(server)
        assert (state["pattern"], state["proven_ranks"]) == (pattern.roles, 2)
        assert check_main([file, "--server", server.url, "--model", str(model)]) == 0
        assert sorted(metric(server.get("/metrics"), "sglang:indexcache_layers").values()) == [3, 3]
        assert {run.layer for run in recorder.indexers(recorder.read(record))} == {
            layers[at] for at in pattern.full_layers
        }


@pytest.mark.parametrize(
    ("letters", "flags", "message"),
    [
        ("FFSFSS", ("--enable-hisparse",), f"--enable-hisparse {NOT_COMBINED}: its buffer holds"),
        ("FFSFSS", ("--enable-return-indexer-topk",), f"--enable-return-indexer-topk {NOT_COMBINED}"),
        ("FFSFSS", ("--enable-two-batch-overlap",), f"--enable-two-batch-overlap {NOT_COMBINED}"),
        ("FFSFSS", ("--attn-cp-size", "2", "--tp-size", "2"), f"--attn-cp-size {NOT_COMBINED}"),
        ("FFSFSS", ("--dcp-size", "2", "--tp-size", "2"), f"--dcp-size {NOT_COMBINED}"),
        ("FFSFSS", ("--enable-prefill-cp",), f"--enable-prefill-cp {NOT_COMBINED}"),
        ("FFSFSS", ("--json-model-override-args", '{"index_topk": 8}'), "index_topk changes which layers choose"),
        ("FFSFSS", ("--json-model-override-args", '{"index_topk_freq": 4}'), "index_topk_freq is not read on"),
        (
            "FFSFSS",
            ("--json-model-override-args", '{"compress_rates": {}}'),
            "compress_rates changes which layers choose",
        ),
        ("FFSFS", (), OTHER_LENGTH.format(5, 6)),
    ],
)
def test_what_it_can_not_be_served_with(model: Path, letters: str, flags: tuple[str, ...], message: str) -> None:
    arguments = command(model, "--indexcache-pattern", letters, "--skip-tokenizer-init", *flags)
    code, lines = launch(arguments[3:])
    assert code == 2 and len(lines) == 1 and message in lines[0], lines


def test_calibration_with_pipeline_stages(model: Path) -> None:
    code, lines = launch(command(model, "--indexcache-calibrate", "--skip-tokenizer-init", "--pp-size", "2")[3:])
    assert code == 2 and len(lines) == 1 and "--pp-size 2 can't be combined with calibration on deepseek_v4" in lines[0]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("forward", "the indexer of letter 3 runs another forward: function"),
        ("index-weights", f"letter 1 is F, but {NOT_LOADED} wq_b.weight"),
        ("index-bias", f"letter 1 is F, but {NOT_LOADED} compressor.ape"),
    ],
)
def test_a_model_that_does_not_run_the_pattern(model: Path, broken: str, message: str) -> None:
    code, lines = load(model, SGLANG_INDEXCACHE_PATTERN="FFSFSS", DSA_CPU_BREAK=broken)
    assert code == 2 and len(lines) == 1 and lines[0].endswith(message), lines


@pytest.mark.slow
def test_a_pipeline_stage_that_begins_with_an_s(model: Path) -> None:
    """Layers 0 to 3 and 4 to 7: letter 2 is the first of the second stage, which gets no indices from the first."""
    flags = ("--indexcache-pattern", "FFSFSS", "--skip-tokenizer-init", "--pp-size", "2")
    code, lines = ended(command(model, *flags), SGLANG_CPU_OMP_THREADS_BIND="0|1")
    expected = "rank 1: letter 2 is the first of its pipeline stage, where nothing was chosen yet: expected F"
    assert code != 0 and set(lines) == {f"indexcache: {expected}"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_source_layer_ids": [1]}, "DeepSeek-V4.1 was trained with indexers that layers share"),
        ({"compress_ratios": [0, 4, 2, 4, 4, 4, 4, 4]}, "compress_ratios has 2 for layer 2; expected"),
    ],
)
def test_models_that_share_by_training(model: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    arguments = command(other, "--indexcache-pattern", "FFSFSS", "--skip-tokenizer-init")
    code, lines = launch(arguments[3:])
    assert code == 2 and len(lines) == 1 and message in lines[0]


def test_an_sglang_that_reads_a_pattern_itself(model: Path, tmp_path: Path) -> None:
    """A newer model file has a line on `index_topk_pattern`."""

    def newer(text: str) -> str:
        line = "        self.indexer = None\n"
        return text.replace(line, f'        getattr(config, "index_topk_pattern", None)\n{line}', 1)

    arguments = command(model, "--indexcache-pattern", "FFSFSS", "--skip-tokenizer-init")
    code, lines = launch(arguments[3:], **changed_source("srt.models.deepseek_v4", newer, tmp_path))
    assert code == 2 and len(lines) == 1
    assert lines[0].startswith("indexcache: SGLang 0.5.23 reads index_topk_pattern in sglang.srt.models.deepseek_v4")
