"""Models whose heads SGLang's kernels don't take: said before a server is started, not by its first pass."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from indexcache_launch.launch_line import LaunchLine, Readings
from sglang_indexcache.check import main
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.dsa.heads import selection_troubles, troubles
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.preflight import Preflight, PreflightError
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import Feature, SglangSource
from tests.conftest import tiny_config, tiny_dense_config, tiny_v4_config


class AnySglang(SglangSource):
    """An SGLang that has all that is needed."""

    def require(self, *features: Feature) -> None:
        pass


@pytest.mark.parametrize(
    ("heads", "flags", "found"),
    [
        (128, "", None),
        (64, "--tp 8", None),
        (20, "--tp 5", None),  # four heads a rank
        (20, "--kv-cache-dtype fp8_e4m3", None),  # flashmla_kv pads
        (20, "--dsa-prefill-backend tilelang", None),
        (20, "--dsa-prefill-backend triton_sparse_mla", None),
        (20, "--nsa-prefill-backend flashmla_kv --nsa-decode-backend flashmla_kv", None),
        (20, "--device cpu --tp 8", None),  # SGLang pads heads there
        (64, "--tp 8 --enable-dp-attention --dp 8", None),  # all heads on each rank
        (20, "", "20 heads on a rank, of 20: SGLang's default"),
        (20, "--tp 2", "10 heads on a rank, of 20: SGLang's default"),
        (20, "--tp 4 --enable-dp-attention --dp 4", "20 heads on a rank, of 20"),
        (96, "--tp 2", "48 heads on a rank, of 96"),
        (20, "--dsa-prefill-backend flashmla_sparse", "--dsa-prefill-backend flashmla_sparse takes divisors and"),
        (20, "--dsa-prefill-backend flashmla_sparse_q8", "takes divisors and multiples of 64 alone"),
        (20, "--kv-cache-dtype fp8_e4m3 --dsa-decode-backend flashmla_sparse", "--dsa-decode-backend flashmla_sparse"),
        (96, "--dsa-prefill-backend tilelang", "takes up to 64, or multiples of 64 alone"),
        (64, "--dsa-prefill-backend triton_sparse_mla", "takes up to 32 alone"),
        (96, "--kv-cache-dtype fp8_e4m3 --dsa-decode-backend trtllm", "takes up to 64, or 128 alone"),
        (20, "--tp 8", "20 heads can't be shared out among 8 ranks of attention; expected 1, 2, 4, 5, 10, 20"),
        (64, "--tp 6 --attn-cp-size 2", "64 heads can't be shared out among 3 ranks"),
    ],
)
def test_heads_of_a_rank_by_the_flags(heads: int, flags: str, found: str | None) -> None:
    lines = [trouble.line for trouble in troubles(heads, Readings.of(flags.split(), None).lines[-1])]
    assert len(lines) == (found is not None)
    assert found is None or found in lines[0]


def test_servers_and_launch_lines_count_alike() -> None:
    """Server arguments have 1 where a launch line has nothing."""
    given: dict[str, Any] = {"tp_size": 8, "attn_cp_size": 1, "device": "cuda", "dsa_prefill_backend": "tilelang"}
    for dp, attention_dp in ((1, 8), (8, 1), (8, 8)):
        sizes = {"dp_size": dp, "attn_dp_size": attention_dp, "enable_dp_attention": True}
        assert not list(troubles(20, SimpleNamespace(**given, **sizes)))
        assert not list(troubles(20, LaunchLine({**given, **sizes})))
    assert list(troubles(20, SimpleNamespace(**given, dp_size=1, attn_dp_size=1, enable_dp_attention=False)))


def test_what_is_expected_is_taken() -> None:
    """The backends and ranks that a line names have no line of their own."""
    (trouble,) = troubles(20, LaunchLine())
    assert not trouble.certain and "\n" not in trouble.line
    expected = trouble.line.partition("expected ")[2]
    for backend in ("flashmla_kv", "tilelang", "triton_sparse_mla", "fa3"):
        assert backend in expected
        assert not list(troubles(20, LaunchLine({"dsa_prefill_backend": backend})))
    assert "5 or 10 or 20 ranks" in expected
    for ranks in (5, 10, 20):
        assert not list(troubles(20, LaunchLine({"tp_size": ranks})))


FLASHINFER = "--dsa-topk-backend flashinfer"


@pytest.mark.parametrize(
    ("index_topk", "flags", "found"),
    [
        (2048, "", {}),
        (64, FLASHINFER, {}),
        (4096, "--device cpu", {}),
        (4096, "", {"--dsa-topk-backend sgl-kernel takes 2048 at most": True}),
        (2049, "--dsa-topk-backend sgl-kernel", {"--dsa-topk-backend sgl-kernel takes 2048 at most": True}),
        (4096, FLASHINFER, {"--dsa-topk-backend flashinfer was never run with more than 2048": False}),
        (4096, "--dsa-topk-backend torch", {"--dsa-topk-backend torch was never run": False}),
    ],
)
def test_selections_by_the_flags(index_topk: int, flags: str, found: dict[str, bool]) -> None:
    lines = list(selection_troubles(index_topk, Readings.of(flags.split(), None).lines[-1]))
    assert [trouble.certain for trouble in lines] == list(found.values())
    for trouble, said in zip(lines, found, strict=True):
        assert said in trouble.line and f"index_topk is {index_topk}: " in trouble.line


def test_a_server_whose_selection_would_end_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang ends with an assertion while it captures graphs, after minutes of loading."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(index_topk=2048)))
    override, said = '{"index_topk": 4096}', "index_topk is 4096: --dsa-topk-backend sgl-kernel takes 2048 at most"
    for arguments in (["--json-model-override-args", override], ["--server-args", f"{FLAG} '{override}'"]):
        assert main(["FSSFSS", "--model", str(tmp_path), *arguments]) == 1
        assert f"\nproblem: {said}" in capsys.readouterr().out
    check = Preflight(PatternSpec.read("FSSFSS"), Asked(), AnySglang(Path(), "0.0"))
    given: dict[str, Any] = {"model_path": str(tmp_path), "json_model_override_args": override}
    with pytest.raises(PreflightError, match=said):
        check.check(SimpleNamespace(**given))
    check.check(SimpleNamespace(**given, dsa_topk_backend="flashinfer"))
    assert check.index_topk == 4096


def glm(**changes: Any) -> dict[str, Any]:
    return tiny_config(num_attention_heads=20, num_key_value_heads=20, **changes)


def test_only_models_with_these_kernels_are_asked() -> None:
    for config, count in ((glm(), 1), (tiny_config(), 0), (tiny_v4_config(), 0), (tiny_dense_config(), 0)):
        model = describe(config, "tiny")
        assert len(list(family_of(model.architecture).sglang.head_troubles(model, LaunchLine()))) == count


def test_check_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(glm()))
    assert main(["FSSFSS", "--model", str(tmp_path)]) == 0
    assert "\nwarning: 20 heads on a rank, of 20: SGLang's default" in capsys.readouterr().out
    assert main(["FSSFSS", "--model", str(tmp_path), "--server-args", "--tp 8"]) == 1
    assert "\nproblem: 20 heads can't be shared out among 8 ranks" in capsys.readouterr().out
    assert main(["FSSFSS", "--model", str(tmp_path), "--server-args", "--kv-cache-dtype fp8_e4m3"]) == 0
    assert "heads on a rank" not in capsys.readouterr().out


def test_a_server_is_refused_or_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(glm()))
    for backend, refused in (("flashmla_sparse", True), (None, False), ("tilelang", False)):
        caplog.clear()
        check = Preflight(PatternSpec.read("FSSFSS"), Asked(), AnySglang(Path(), "0.0"))
        arguments = SimpleNamespace(model_path=str(tmp_path), dsa_prefill_backend=backend)
        if refused:
            with pytest.raises(
                PreflightError, match="20 heads on a rank, of 20: --dsa-prefill-backend flashmla_sparse"
            ):
                check.check(arguments)
            continue
        check.check(arguments)
        assert ("20 heads on a rank" in caplog.text) == (backend is None)
