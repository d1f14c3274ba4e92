"""An SGLang whose replaced methods nobody has read is refused by name: names and parameters stay, meanings change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from indexcache_dense.family import backends
from indexcache_dense.selection import DEFAULT
from indexcache_launch.environment import Environment, all_features
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main
from sglang_indexcache.families import known_families
from sglang_indexcache.families.dsa import needs
from sglang_indexcache.io.errors import IndexCacheError, ProofError
from sglang_indexcache.io.refusal import UNREAD_VARIABLE
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.preflight import Preflight, PreflightError
from sglang_indexcache.sglang import probes, read_sources
from sglang_indexcache.sglang.asked import Asked, split_arguments
from sglang_indexcache.sglang.probes import Need, SglangSource
from sglang_indexcache.sglang.read_sources import READ, digest, never_run
from sglang_indexcache.sglang.requested import Request, request_of
from tests.conftest import V4_LAYERS, tiny_config, tiny_dense_config, tiny_v4_config
from tests.core.test_probes import ALL_NEEDS, write_sglang

REPLACING = [feature for feature in all_features() if feature.reads]


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SglangSource:
    """An SGLang that has all names and parameters; what is in it is as if it had been read."""
    source = write_sglang(tmp_path / "newer", [*ALL_NEEDS, *(need for item in REPLACING for need in item.reads)])
    texts = {need.target: source.definition(need) for feature in REPLACING for need in feature.reads}
    read = {target: {digest(text): "0.5.99"} for target, text in texts.items() if text is not None}
    assert read.keys() == {need.target for feature in REPLACING for need in feature.reads}
    monkeypatch.setattr(probes, "READ", read)
    return source


def changed(source: SglangSource, need: Need) -> SglangSource:
    """The same SGLang with another line in one function."""
    path = source.root.joinpath(*need.module.split(".")).with_suffix(".py")
    name = need.name.rpartition(".")[2]
    indent = "    " if "." in need.name else ""
    path.write_text(path.read_text().replace(f"def {name}(", f"@rows_are_shared_out\n{indent}def {name}("))
    return SglangSource.at(source.root.parent)


def renamed(source: SglangSource, need: Need) -> SglangSource:
    """The same SGLang with another name for one function."""
    path = source.root.joinpath(*need.module.split(".")).with_suffix(".py")
    name = need.name.rpartition(".")[2]
    path.write_text(path.read_text().replace(f"def {name}(", f"def {name}_of_a_next_version("))
    return SglangSource.at(source.root.parent)


def preflight(
    source: SglangSource, model: str, pattern: str, *, shard: bool = False, group: bool = True, allow: bool = False
) -> Any:
    asked = Asked(shard=shard, ungrouped=not group, allow_unread=allow)
    return Preflight(PatternSpec.read(pattern), asked, source).family_at(model)


def model(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def named(family: str) -> Any:
    return next(item.sglang for item in known_families() if item.name == family)


def test_every_function_that_is_replaced_has_a_row_for_its_versions() -> None:
    assert READ.keys() == {need.target for feature in REPLACING for need in feature.reads}
    assert all(read for read in READ.values())
    assert all(len(text) == 16 for read in READ.values() for text in read)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize("what", ["blocks", "shared out"])
def test_dsa_models(number: int, what: str, newer: SglangSource, tmp_path: Path) -> None:
    """Each function of blocks, sharing out and grouping, its callers among them; a plain pattern replaces none."""
    glm = model(tmp_path, tiny_config(layers=6))
    listed = dict.fromkeys([*named("dsa").blocks.reads, *named("dsa").grouping.reads])
    need = list(listed)[number]
    pattern, shard = ("FSSFSS+3q4", False) if what == "blocks" else ("FSSFSS", True)
    preflight(newer, glm, pattern, shard=shard)
    other = changed(newer, need)
    if what == "blocks" or need in named("dsa").sharding.reads:
        with pytest.raises(PreflightError) as refused:
            preflight(other, glm, pattern, shard=shard)
        line = str(refused.value)
        assert need.target in line and "0.5.99" in line and "--indexcache-allow-unread-source" in line
        assert "\n" not in line
    preflight(other, glm, pattern, shard=shard, allow=True)
    preflight(other, glm, "FSSFSS")
    if need in named("dsa").grouping.reads:
        preflight(other, glm, pattern, shard=shard, group=False)


@pytest.mark.parametrize("need", needs.SELECTING, ids=lambda item: item.name)
def test_a_caller_that_has_another_name_was_not_read(need: Need, newer: SglangSource, tmp_path: Path) -> None:
    """Of what the plugin replaces it needs the name anyway; what calls that may be anywhere."""
    glm = model(tmp_path, tiny_config(layers=6))
    other = renamed(newer, need)
    for pattern, shard in (("FSSFSS+3q4", False), ("FSSFSS", True)):
        with pytest.raises(IndexCacheError, match=need.name.rpartition(".")[2]):
            preflight(other, glm, pattern, shard=shard)
    preflight(other, glm, "FSSFSS")


def test_the_check_says_what_the_server_would(
    newer: SglangSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model or a launch line; what it has no word for it leaves to other lines."""
    glm = model(tmp_path, tiny_config(layers=6))
    folder = str(changed(newer, needs.RAGGED).root.parent)

    def problems(pattern: str, *more: str) -> list[str]:
        main([pattern, "--sglang", folder, "--json", *more])
        found = json.loads(capsys.readouterr().out)["problems"]
        return [line for line in found if "nobody here has read" in line and needs.RAGGED.target in line]

    assert len(problems("FSSFSS+3q4", "--model", glm)) == 1 and not problems("FSSFSS", "--model", glm)
    assert (
        main(["FSSFSS+3q4", "--sglang", folder, "--model", glm]) == 1 and "no problems" not in capsys.readouterr().out
    )
    shared = "--indexcache-shard-indexers --tp 2"
    for more in ((), ("--model", glm)):
        assert len(problems("FSSFSS+3q4", *more, "--server-args", "--tp 2")) == 1
        assert len(problems("FSSFSS", *more, "--server-args", shared)) == 1
        assert not problems("FSSFSS", *more, "--server-args", "--tp 2")
        assert not problems("FSSFSS", *more, "--server-args", f"{shared} --indexcache-allow-unread-source")
        assert not problems("FSSFSS", *more, "--server-args", f"{UNREAD_VARIABLE}=1 {shared}")
    grouping = named("dsa").grouping.reads[0]
    folder = str(changed(newer, grouping).root.parent)
    with_grouping = main(["FSSFSS+3q4", "--sglang", folder, "--server-args", "--tp 2"])
    assert with_grouping == 1 and grouping.target in capsys.readouterr().out
    main(["FSSFSS+3q4", "--sglang", folder, "--server-args", "--tp 2 --indexcache-no-grouping"])
    assert grouping.target not in capsys.readouterr().out


def test_what_read_versions_lack_may_be_missing(newer: SglangSource, monkeypatch: pytest.MonkeyPatch) -> None:
    grouping = named("dsa").grouping
    late = grouping.reads[-1]
    other = renamed(newer, late)
    assert f"has in the place of {late.target}, and grouping" in str(other.unread(grouping))
    read = {**probes.READ, late.target: {**probes.READ[late.target], read_sources.MISSING: "0.5.98, which has none"}}
    monkeypatch.setattr(probes, "READ", read)
    assert other.unread(grouping) is None
    assert [target for target, known in READ.items() if read_sources.MISSING in known] == [late.target]


def test_deepseek_v4(newer: SglangSource, tmp_path: Path) -> None:
    v4, shared, full = model(tmp_path, tiny_v4_config()), "F" + "S" * (len(V4_LAYERS) - 1), "F" * len(V4_LAYERS)
    preflight(newer, v4, shared)
    other = changed(newer, named("deepseek_v4").serving.reads[0])
    with pytest.raises(PreflightError, match=r"C4Indexer\.forward as it is in SGLang unknown"):
        preflight(other, v4, shared)
    preflight(other, v4, full)
    preflight(other, v4, shared, allow=True)


@pytest.mark.parametrize("backend", backends.BACKENDS, ids=lambda item: item.name)
def test_dense_models(backend: backends.Backend, newer: SglangSource, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = type(backend.stock, (), {"__module__": f"sglang.{backend.module}"})
    made: list[Any] = []
    home = SimpleNamespace(make_backend_class=lambda found: made.append(found) or type("Made", (found,), {}))
    monkeypatch.setattr(backends, "import_module", lambda name: home)
    for need in backend.feature.reads:
        other = changed(newer, need)
        monkeypatch.setattr(SglangSource, "installed", classmethod(lambda cls, other=other: other))
        with pytest.raises(ProofError, match=rf"{backend.stock}\.\w+ as it is in SGLang unknown"):
            backends.make_backend_class(stock)
        assert made == []
    backends.make_backend_class(stock, allow_unread=True)
    assert made == [stock]


@pytest.mark.parametrize("backend", backends.BACKENDS, ids=lambda item: item.name)
def test_the_check_speaks_of_the_backend_of_a_dense_model(
    backend: backends.Backend, newer: SglangSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said nothing of it, and the server ended once it had loaded the model."""
    need = backend.feature.reads[0]
    folder, dense = str(changed(newer, need).root.parent), tiny_dense_config()
    arguments = ["--sglang", folder, "--model", model(tmp_path, dense)]
    pattern_file(Pattern("D" + "S" * (dense["num_hidden_layers"] - 1), DEFAULT), dense).save(tmp_path / "p.yaml")

    def problems(*more: str) -> list[str]:
        main([str(tmp_path / "p.yaml"), *arguments, "--json", *more])
        found = json.loads(capsys.readouterr().out)["problems"]
        return [line for line in found if "nobody here has read" in line and need.target in line]

    assert len(problems()) == len(problems("--server-args", "--tp 1")) == 1  # SGLang may take any of them
    for other in backends.BACKENDS:
        named = problems("--server-args", f"--attention-backend {other.name}")
        assert len(named) == (other is backend)
    assert not problems("--server-args", "--indexcache-allow-unread-source")


def requested() -> Request:
    request = request_of(SimpleNamespace())
    assert request is not None
    return request


def test_the_flag_and_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_arguments(["--indexcache-pattern", "FSF", "--indexcache-allow-unread-source"])[0].allow_unread
    assert not split_arguments(["--indexcache-pattern", "FSF"])[0].allow_unread
    monkeypatch.setenv("SGLANG_INDEXCACHE_PATTERN", "FSF")
    for value, wanted in (("1", True), ("0", False)):
        monkeypatch.setenv(UNREAD_VARIABLE, value)
        assert requested().asked.allow_unread is wanted
    monkeypatch.setenv(UNREAD_VARIABLE, "yes")
    with pytest.raises(SystemExit):
        request_of(SimpleNamespace())
    assert os.environ[UNREAD_VARIABLE] == "yes"


def test_the_table_of_an_sglang_says_what_nobody_has_read(newer: SglangSource) -> None:
    assert "unread" not in Environment.of(newer).as_text()
    text = " ".join(Environment.of(changed(newer, named("dsa").blocks.reads[0])).as_text().split())
    assert "unread blocks" in text and "unread sharding" in text and "_get_topk_ragged as it is" in text
    assert "no server with it, without --indexcache-allow-unread-source" in text


def test_versions_that_patterns_ran_on() -> None:
    assert [never_run(version) for version in (*read_sources.RAN, "0.5.23+cu130")] == [None] * 3
    line = "patterns were never run on SGLang 0.5.24, only on 0.5.17 and 0.5.23"
    assert never_run("0.5.24") == line and never_run("unknown") is not None


def test_a_digest_is_of_the_text_with_its_decorators(tmp_path: Path) -> None:
    path = tmp_path / "sglang/srt/x.py"
    path.parent.mkdir(parents=True)
    need, found = Need("srt.x", "A.f"), []
    for text in (
        "class A:\n    @a\n    def f(self):\n        return 1\n",
        "\n\nclass A:\n    @a\n    def f(self):   \n        return 1\n\n    def g(self): ...\n",
        "class A:\n    @b\n    def f(self):\n        return 1\n",
        "class A:\n    @a\n    def f(self):\n        return 2\n",
    ):
        path.write_text(text)
        found.append(digest(SglangSource.at(tmp_path).definition(need) or ""))
    assert found[0] == found[1] and len({*found}) == 3
    assert SglangSource.at(tmp_path).definition(Need("srt.x", "A.h")) is None
    assert SglangSource.at(tmp_path).definition(Need("srt.y", "f")) is None
