"""Features are judged by what an SGLang's source has."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from indexcache_launch.environment import Environment, family_features
from sglang_indexcache.check import main
from sglang_indexcache.families import known_families
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.probes import FEATURES, Feature, Need, SglangError, SglangSource


def write_sglang(folder: Path, needs: list[Need]) -> SglangSource:
    """A source tree with exactly what `needs` ask for."""
    modules: dict[str, dict[str, list[str]]] = {}
    for need in needs:
        owner, _, member = need.name.rpartition(".")
        lines = modules.setdefault(need.module, {}).setdefault(owner, [])
        if member[0].isupper() and not owner:
            modules[need.module].setdefault(member, []).extend(f"x.{name}" for name in need.mentions)
        elif member in ("internal_state", "model_name", "current_scheduler_metrics_enabled", "c4_sparse_page_indices"):
            lines.append(f"{member}: str")
        else:
            body = "; ".join([f"x.{name}" for name in need.mentions] or ["pass"])
            lines.append(f"def {member}({', '.join(need.parameters)}): {body}")
    for module, classes in modules.items():
        path = (folder / "sglang").joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = []
        for owner, lines in classes.items():
            text += lines if not owner else [f"class {owner}:", "    pass", *(f"    {line}" for line in lines)]
        path.write_text("\n".join(text) + "\n")
        ast.parse(path.read_text())
    return SglangSource.at(folder)


ALL = (*FEATURES, *family_features())
ALL_NEEDS = list(dict.fromkeys(need for feature in ALL for need in feature.needs))


def test_a_source_that_has_everything_enables_everything(tmp_path: Path) -> None:
    environment = Environment.of(write_sglang(tmp_path, ALL_NEEDS))
    assert [row.refused for row in environment.features] == [None] * len(ALL)
    assert environment.can_serve and "\npatterns can be served\nwarning: patterns were never run on SGLang unknown" in (
        environment.as_text()
    )


@pytest.mark.parametrize("need", ALL_NEEDS, ids=lambda need: need.target)
def test_each_missing_place_refuses_the_features_that_need_it(need: Need, tmp_path: Path) -> None:
    source = write_sglang(tmp_path, [other for other in ALL_NEEDS if other != need])
    for feature in ALL:
        reason = source.refusal(feature)
        assert (reason is not None) == (need in feature.needs)
        if reason is not None:
            assert reason.startswith("needs ") and need.module in reason and "SGLang unknown" in reason
    required = any(need in feature.needs for feature in probes.REQUIRED)
    required |= all(need in family.sglang.serving.needs for family in known_families())
    assert Environment.of(source).can_serve != required


def test_a_missing_parameter_names_what_is_there(tmp_path: Path) -> None:
    need = Need("srt.x", "f", ("a", "b"))
    source = write_sglang(tmp_path, [Need("srt.x", "f", ("a", "c"))])
    assert source.missing(need) == "needs sglang.srt.x.f(b), found (a, c) in SGLang unknown"
    assert source.refusal(Feature("x", "", (need,), "")) is not None


@pytest.mark.parametrize(("more", "named"), [(("c",), "c"), (("*rows",), "*rows"), (("*", "d"), "d")])
def test_a_closed_function_takes_nothing_else(more: tuple[str, ...], named: str, tmp_path: Path) -> None:
    """What stands in for it would hand on what it does not know."""
    need = Need("srt.x", "f", ("a", "b"), closed=True)
    assert write_sglang(tmp_path / "as-known", [need]).missing(need) is None
    source = write_sglang(tmp_path / "newer", [Need("srt.x", "f", ("a", "b", *more))])
    assert (
        source.missing(need) == f"SGLang unknown hands {named} to sglang.srt.x.f, which this plugin does not know yet"
    )


def test_an_sglang_that_does_it_by_itself_is_refused(tmp_path: Path) -> None:
    need = Need("srt.x", "A", without=("index_topk_pattern",))
    source = write_sglang(tmp_path, [Need("srt.x", "A", mentions=("other",))])
    assert source.missing(need) is None
    source = write_sglang(tmp_path, [Need("srt.x", "A", mentions=("index_topk_pattern",))])
    assert SglangSource.at(tmp_path).missing(need) == (
        "SGLang unknown reads index_topk_pattern in sglang.srt.x.A itself, which this plugin does not know yet"
    )
    serving = next(family.sglang.serving for family in known_families() if family.name == "deepseek_v4")
    assert any("index_topk_pattern" in need.without for need in serving.needs)


def test_definitions_below_if_and_try_are_found(tmp_path: Path) -> None:
    source = write_sglang(tmp_path, [Need("srt.x", "f")])
    (tmp_path / "sglang/srt/x.py").write_text(
        "try:\n  if True:\n    class A:\n      async def g(self): ...\nfinally: ...\n"
    )
    assert source.missing(Need("srt.x", "A.g", ("self",))) is None
    assert source.missing(Need("srt.x", "A.h")) == "needs sglang.srt.x.A.h, which is not in SGLang unknown"
    assert source.missing(Need("srt.y", "f")) == "needs sglang.srt.y, which is not in SGLang unknown"


def test_the_environment_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sglang(tmp_path, ALL_NEEDS)
    (tmp_path / "sglang-0.9.9.dist-info").mkdir()
    assert main(["--environment", "--sglang", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("SGLang 0.9.9 in ")
    write_sglang(tmp_path / "old", [need for need in ALL_NEEDS if need != probes.NEW_MODEL])
    assert main(["--environment", "--sglang", str(tmp_path / "old"), "--json"]) == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    [refused] = [row for row in found["features"] if row["refused"] is not None]
    assert refused["name"] == "weights" and refused["required"] and probes.NEW_MODEL.module in refused["refused"]
    assert found["sglang"] == "unknown" and shown.err == ""
    assert main(["--environment", "--sglang", str(tmp_path / "nothing")]) == 2
    assert "expected an unpacked wheel" in capsys.readouterr().err


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SglangError, match="found no sglang/srt"):
        SglangSource.at(tmp_path)
