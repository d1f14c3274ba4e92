"""What is known of a launch line, without SGLang: ran, refused or not run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from indexcache_dense.family import DENSE_GQA
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from indexcache_launch.combinations import COMBINATIONS
from indexcache_launch.judge import family_in, judge, proven_first, verdicts
from indexcache_launch.launch_line import LaunchLine, Readings
from indexcache_launch.options import parser_of
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern, launch_server
from sglang_indexcache.check import main as check_main
from sglang_indexcache.families import family_of
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.combination import NOT_RUN, RAN, REFUSED
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io import refusal
from sglang_indexcache.io.messages import NOT_COMBINED
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.sglang.asked import LaunchError
from tests.conftest import tiny_config, tiny_v4_config

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "compatibility.md"
EIGHT = "--model-path zai-org/GLM-5-FP8 --tp 8"
SHARED = Pattern("FSSFSS")
COMPRESSED = Selection(page_tokens=16, pages=4, recent_pages=1, sink_pages=0, score="compressed_keys")


def states(line: str, pattern: Pattern = SHARED, shard: bool = False) -> dict[str, str]:
    """Verdicts of a line on a CPU, where nothing is on by default."""
    found = verdicts(pattern, DSA, on_cpu(line), shard=shard)
    return {verdict.name: verdict.state for verdict in found}


def on_cpu(line: str) -> LaunchLine:
    return LaunchLine.parse(f"{line} --device cpu".split())


def test_launch_lines_are_read_without_sglang() -> None:
    line = LaunchLine.parse(
        "--tp 8 --dp-size=2 --enable-dp-attention --log-level info --dist-init-addr a-b:1 x".split()
    )
    assert (line.tp_size, line.dp_size, line.enable_dp_attention, line.log_level) == (8, 2, True, "info")
    assert line.dist_init_addr == "a-b:1" and line.pp_size is None
    assert LaunchLine.parse(["--pp-size", "1", "--pp-size", "2"]).pp_size == 2
    assert LaunchLine.parse(["--speculative-algorithm="]).speculative_algorithm == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"tensor parallelism": RAN}),
        ("--dp 8 --enable-dp-attention", {"tensor parallelism": RAN, "data-parallel attention": RAN}),
        ("--dp 2", {"tensor parallelism": RAN, "replicas": RAN}),
        ("--ep 8 --moe-a2a-backend deepep", {"expert parallelism": RAN, "all-to-all of experts": NOT_RUN}),
        ("--speculative-algorithm EAGLE --speculative-num-steps 3", {"MTP/NextN, EAGLE": RAN}),
        ("--speculative-algorithm EAGLE --speculative-eagle-topk 4", {"other drafts": NOT_RUN}),
        ("--speculative-algorithm EAGLE3", {"other drafts": NOT_RUN}),
        ("--attn-cp-size 2 --enable-prefill-cp --cp-strategy interleave", {"context-parallel prefill": RAN}),
        ("--attn-cp-size 2 --enable-prefill-cp --cp-strategy zigzag", {"other context parallelism": NOT_RUN}),
        ("--dcp-size 2", {"decode context parallelism": RAN}),
        (
            "--attn-cp-size 2 --enable-prefill-cp --cp-strategy interleave --enable-cp-decode-attn-tp",
            {
                "context-parallel prefill": RAN,
                "heads shared out in decoding, beside context-parallel prefill": RAN,
            },
        ),
        ("--disaggregation-mode prefill", {"prefill and decode apart": RAN}),
        ("--kv-cache-dtype fp8_e4m3", {"fp8 KV cache": RAN}),
        ("--kv-cache-dtype fp8_e5m2", {"other types of KV cache": NOT_RUN}),
        ("--kv-cache-dtype nvfp4", {"other types of KV cache": NOT_RUN}),
        ("--kv-cache-dtype bfloat16 --page-size 64 --dtype auto", {}),
        ("--page-size 32", {"--page-size 32": NOT_RUN}),
        ("--attn-dp-size 8 --enable-hicache", {"data-parallel attention": RAN, "HiCache": RAN}),
        ("--speculative-algo NEXTN", {"MTP/NextN, EAGLE": RAN}),
        ("--enable-two-batch", {"--enable-two-batch-overlap": REFUSED}),
        ("--use-ray", {"--use-ray": REFUSED}),
        ("--enable-single-batch", {"--enable-single-batch, which is --enable-single-batch-overlap": NOT_RUN}),
        ("--dsa-prefill-backend fa3", {"kernels of sparse attention in prompts": RAN}),
        ("--dsa-prefill-backend tilelang", {"--dsa-prefill-backend tilelang": NOT_RUN}),
        (
            "--dsa-prefill-backend flashmla_kv --dsa-decode-backend trtllm",
            {"kernels of sparse attention in prompts": RAN, "--dsa-decode-backend trtllm": NOT_RUN},
        ),
        ("--no-enable-dsa-fused-indexer", {"--no-enable-dsa-fused-indexer": NOT_RUN}),
        ("--cuda-graph-backend-decode breakable", {"--cuda-graph-backend-decode breakable": NOT_RUN}),
        ('--cuda-graph-config {"prefill":{"backend":"breakable"}}', {"graphs of prompts": RAN}),
        ("--port 1 --api-key secret --mem-fraction-static 0.8 --chunked-prefill-size 8192", {}),
        ("--enable-two-batch-overlap", {"--enable-two-batch-overlap": REFUSED}),
        ("--cuda-graph-backend-prefill disabled", {}),
    ],
)
def test_eight_gpus_of_glm_5(line: str, expected: dict[str, str]) -> None:
    assert states(f"{EIGHT} {line}") == {"tensor parallelism": RAN, **expected}


def test_refusals_depend_on_pattern_and_family() -> None:
    line = "--attn-cp-size 2"
    assert states(line, SHARED.selecting_for(0, 4))["--attn-cp-size"] == REFUSED
    assert states(line, Pattern("FFF"), shard=True)["--attn-cp-size"] == REFUSED
    dense = Pattern("DSS", replace(COMPRESSED, score="token_max"))
    for line in ("--attn-dp-size 2", "--enable-prefill-cp", "--dcp-size 2"):  # newer names of what it refuses, too
        assert REFUSED in {item.state for item in verdicts(dense, DENSE_GQA, on_cpu(line))}
    assert states("--enable-two-batch-overlap", Pattern("FFF")) == {"--enable-two-batch-overlap": NOT_RUN}
    [found] = verdicts(SHARED, DEEPSEEK_V4, on_cpu("--enable-hisparse"))
    assert found.state == REFUSED and f"--enable-hisparse {NOT_COMBINED}" in found.why
    file = PatternSpec("glm.yaml", pattern_file(SHARED, tiny_config()))
    assert family_in(file) is family_of("GlmMoeDsaForCausalLM") and family_in(PatternSpec.read("FSSF")) is None


def test_a_family_that_is_assumed_is_said_to_be(tmp_path: Path) -> None:
    """Letters beside a hub id were judged as a DSA model's, whatever the model is, without a word."""
    letters, line = PatternSpec.read("FSSF"), "--device cpu --enable-prefill-cp --cp-strategy interleave"
    for model, family in (("deepseek-ai/DeepSeek-V4-Flash", None), (str(tmp_path / "v4"), DEEPSEEK_V4)):
        (tmp_path / "v4").mkdir(exist_ok=True)
        (tmp_path / "v4" / "config.json").write_text(json.dumps(tiny_v4_config()))
        known = family_in(letters, model)
        assert known is family
        found = judge(letters.known(), known, Readings.of([*line.split(), "--model-path", model], None))
        assert [note for note in found.notes if "taken for a DSA model" in note] == list(found.notes[1:])
        assert (len(found.notes) == 2) == (known is None)
        assert bool([why for why in found.problems if "on DeepSeek-V4" in why]) == (known is not None)
    (tmp_path / "v4" / "config.json").write_text("{}")  # whoever serves it says what is wrong
    assert family_in(letters, str(tmp_path / "v4")) is None


def test_refusals_of_what_is_kept_while_prompts_are_read() -> None:
    """F layers, without an S too, and memory; what selects by its own step's attention keeps nothing."""
    kept, plain = Pattern("DFF", COMPRESSED), Pattern("DSS", replace(COMPRESSED, score="token_max"))
    rounded = replace(kept, selection=replace(COMPRESSED, score="rounded_keys"))
    averaged = Pattern("DSS", replace(COMPRESSED, score="token_max", steps=ReusePolicy.parse("ema:0.5")))
    for line, flag, version in (
        ("--disaggregation-mode decode", "--disaggregation-mode", "0.5.23"),
        ("--cuda-graph-backend-prefill tc_piecewise", "--cuda-graph-backend-prefill", "0.5.20"),
        ("--enable-pd-role-switch", "--enable-pd-role-switch", "0.5.23"),
        ('--cuda-graph-config {"prefill":{"backend":"tc_piecewise"}}', "--cuda-graph-backend-prefill", "0.5.20"),
        ("--enable-piecewise-cuda-graph", "--enable-piecewise-cuda-graph", "0.5.13.post1"),
    ):
        arguments = LaunchLine.parse([*line.split(), "--device", "cpu"], parser_of(version))
        for pattern, what in (
            (kept, "score compressed_keys"),
            (rounded, "score rounded_keys"),
            (averaged, "steps ema:0.5"),
        ):
            [found] = [item for item in verdicts(pattern, DENSE_GQA, arguments) if item.state == REFUSED]
            said = line if "{" not in line else f"{flag} tc_piecewise"
            assert found.name == flag and found.why.startswith(f"{said} can't be combined with {what}: ")
        assert not [item for item in verdicts(plain, DENSE_GQA, arguments) if item.state == REFUSED]
    mixed = on_cpu("--enable-mixed-chunk")
    for pattern, state in ((kept, REFUSED), (Pattern("DDD", COMPRESSED), NOT_RUN)):
        assert [item.state for item in verdicts(pattern, DENSE_GQA, mixed)] == [state]
    prefill = on_cpu("--disaggregation-mode prefill")
    assert [item.state for item in verdicts(kept, DENSE_GQA, prefill)] == [NOT_RUN]


def test_what_ran_with_f_and_s_on_dsa_models_is_said_of_nothing_else() -> None:
    line = on_cpu("--speculative-algorithm EAGLE")
    for pattern, family, shard in (
        (SHARED.selecting_for(0, 4), DSA, False),
        (SHARED, DSA, True),
        (SHARED, DEEPSEEK_V4, False),
    ):
        [found] = verdicts(pattern, family, line, shard=shard)
        assert found.state == NOT_RUN and found.why.startswith("compared with F and S on DSA models alone: SGLang")


def test_the_page_has_every_combination() -> None:
    page = PAGE.read_text()
    for item in (*COMBINATIONS, *DENSE_GQA.sglang.combinations()):
        flags, verdict = ", ".join(f"`{flag}`" for flag in item.flags), item.verdict
        assert f"| {item.name} | {flags} | {verdict.state} | {verdict.why} |\n" in page, item.name


def test_the_command_answers_offline(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--tp 8 --speculative-algorithm EAGLE --moe-a2a-backend deepep --device cpu"
    assert check_main(["FSSFSS", "--server-args", line]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("counted in draft extend, extend, target verify passes")
    assert lines[1].startswith("note: taken for a DSA model, since neither a pattern file nor a config.json at hand")
    assert [line.split(" (")[0] for line in lines[2:]] == [
        "ran: tensor parallelism",
        "not run: all-to-all of experts",
        "ran: MTP/NextN, EAGLE",
    ]
    assert check_main(["FSSFSS", "--json", "--server-args", "--enable-lmcache"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["combinations"][0]["state"] == REFUSED and "--enable-lmcache can't be" in found["problems"][0]


def test_the_launcher_says_it_before_sglang_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_server, "check_plugin_is_found", lambda: None)
    monkeypatch.setenv(refusal.PATTERN_VARIABLE, "")
    monkeypatch.setenv(refusal.ALLOW_MISMATCH_VARIABLE, "")
    launch_server.prepare(["--indexcache-pattern", "FSSFSS", "--tp", "8", "--attn-cp-size", "2", "--device", "cpu"])
    notes = capsys.readouterr().err.splitlines()
    assert all(note.startswith("note from indexcache: ") for note in notes)
    assert (
        notes[-1].endswith("not run: other context parallelism (SGLang 0.5.23 serves no DSA model with zigzag)")
        and len(notes) == 4
    )
    assert "taken for a DSA model" in notes[1]
    with pytest.raises(LaunchError, match=f"--enable-flexkv {NOT_COMBINED}"):
        launch_server.prepare(["--indexcache-pattern", "FSSFSS", "--enable-flexkv"])
    launch_server.prepare(["--indexcache-pattern", "FFF", "--enable-flexkv"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("version", "line", "found"),
    [
        ("0.5.23", "", {RAN: "graphs of prompts", NOT_RUN: "fp8 KV cache and TRT-LLM kernels on Blackwell GPUs"}),
        ("0.5.15.post1", "--kv-cache-dtype bf16", {}),  # indexers were left out of graphs until 0.5.17
        ("0.5.23", "--kv-cache-dtype bf16 --disable-cuda-graph", {}),
        ("0.5.23", "--kv-cache-dtype bf16 --disaggregation-mode decode", {RAN: "prefill and decode apart"}),
        ("0.5.17", "--kv-cache-dtype bf16 --enable-breakable-cuda-graph", {RAN: "graphs of prompts"}),
        ("0.5.20", "--kv-cache-dtype bf16", {RAN: "graphs of prompts"}),
    ],
)
def test_a_default_that_is_on_counts_as_given(version: str, line: str, found: dict[str, str]) -> None:
    """Prompts are captured on Hopper without a flag: a server with blocks ended there on its first long prompt."""
    read = LaunchLine.parse(line.split(), parser_of(version))
    assert {item.state: item.name for item in verdicts(SHARED, DSA, read)} == found
    blocks = {item.name: item.state for item in verdicts(SHARED.selecting_for(0, 4), DSA, read)}
    assert blocks == dict.fromkeys(found.values(), NOT_RUN)


@pytest.mark.parametrize(
    ("line", "family", "said"),
    [
        ("", DSA, "counted in decode, extend passes"),
        ("--skip-server-warmup", DSA, "counted in the first decode, extend passes of users' requests, since"),
        ("--speculative-algo EAGLE", DSA, "counted in draft extend, extend, target verify passes"),
        ("--speculative-algo EAGLE", DEEPSEEK_V4, "counted in extend, target verify passes"),
        ("--disaggregation-mode decode", DSA, "counted in decode passes"),
        ("", DENSE_GQA, "role of every layer and rank; nothing is counted"),
    ],
)
def test_what_is_proven_first_is_true_of_that_launch(line: str, family: Family, said: str) -> None:
    assert said in proven_first(LaunchLine.parse(line.split()), family)


def test_variables_of_what_upstream_may_merge_are_refused() -> None:
    """Their code would share out, or carry on, rows that blocks and shared-out indexers have rearranged."""
    readings = Readings.of(["--device", "cpu"], None)
    for name in ("SGLANG_DSA_INDEXER_M_SPLIT", "SGLANG_USE_SM90_LITETOPK", "SGLANG_NPU_ENABLE_DSA_CP"):
        [found] = judge(SHARED, DSA, readings, variables={name: "1"}).verdicts
        assert found.state == REFUSED and name in found.why
        assert not judge(SHARED, DSA, readings, variables={name: "0"}).verdicts
        assert not judge(Pattern("FFF"), DSA, readings, variables={name: "1"}).problems
    others = {"SGLANG_DSA_FUSE_TOPK": "0", "SGLANG_DISABLE_DSA_INDEXER_FUSION": "1", "SGLANG_HOST_IP": "x", "A": "1"}
    found = judge(SHARED, DSA, readings, variables=others).verdicts
    assert {item.name: item.state for item in found} == {
        "SGLANG_DISABLE_DSA_INDEXER_FUSION": NOT_RUN,
        "SGLANG_DSA_FUSE_TOPK": RAN,
    }


def test_levels_that_hide_what_the_server_says_are_named() -> None:
    for level, notes in (("info", 0), ("debug", 0), ("error", 1), ("WARNING", 1)):
        assert len(judge(SHARED, DSA, Readings.of(["--log-level", level], None)).notes) == notes
