"""Extensions that are broken, greedy or of another version are one line, and never silently absent."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from indexcache_search import strategies as search_strategies
from indexcache_search.cli import evaluate, extra
from indexcache_search.cli.command import application
from indexcache_search.console import messages
from indexcache_search.engines import own_server
from indexcache_search.eval.extra import ExtraComparison, ExtraJob
from indexcache_search.eval.result import ever
from indexcache_search.eval.speeds import Speeds
from indexcache_search.eval.tasks import Tasks
from indexcache_search.results.pages import Pages
from indexcache_search.strategies.base import Strategy
from sglang_indexcache import Pattern, PatternFile, check, families
from sglang_indexcache.checkpoint import findings
from sglang_indexcache.checkpoint.findings import Launches, Listing, Remarks
from sglang_indexcache.families.base import Family
from sglang_indexcache.io.errors import IndexCacheError, PatternError, PatternFileError
from sglang_indexcache.io.extensions import ExtensionError, extensions
from sglang_indexcache.launch_server import tell
from sglang_indexcache.pattern import selection
from sglang_indexcache.pattern.selection import PatternSelection, selection_type
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.pattern_file.remote import RemoteFile
from sglang_indexcache.pattern_file.result_folder import ResultFolder
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.override_flag import FLAG
from tests.conftest import PAGES, tiny_config

Install = Callable[..., None]
CODE = """
from dataclasses import replace
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.hy_v4 import HY_V4
from indexcache_search.strategies.base import Strategy
from indexcache_search.strategies.greedy import Greedy
SAME_NAME = HY_V4
SAME_ARCHITECTURE = replace(DSA, name="mine")
OTHER = object()
class Greedier(Greedy): pass
class Older(Strategy):
    name = "older"
    summary = "of a version in which strategies had another method"
    def search(self, problem): pass
class Nameless(Strategy):
    def find(self, problem): pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution that has one extension."""
    caches = (extensions, families.known_families, families._by_architecture, search_strategies.strategies)

    def forget() -> None:
        for item in caches:
            item.cache_clear()

    def install(group: str, name: str, value: str, code: str = CODE, distribution: str = "adversary") -> None:
        folder = tmp_path / distribution
        information = folder / f"{distribution}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[indexcache.{group}]\n{name} = {value}\n")
        (folder / f"{distribution}_code.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(__import__("sys").modules, f"{distribution}_code", raising=False)
        forget()

    yield install
    forget()


@pytest.mark.parametrize(
    ("value", "code", "why"),
    [
        ("adversary_code:X", "raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
        ("adversary_code:X", "X = (", "SyntaxError: "),
        ("adversary_code:X", "", "AttributeError: module 'adversary_code' has no attribute 'X'"),
        ("adversary_nowhere:X", "", "ModuleNotFoundError: No module named 'adversary_nowhere'"),
        ("adversary_code:X", "from sglang_indexcache.families.base import Family\nX = Family('a')", "TypeError: "),
    ],
)
def test_a_broken_extension_is_one_line_for_every_model(install: Install, value: str, code: str, why: str) -> None:
    install("families", "broken", value, code)
    line = f"extension broken = {value} of indexcache.families (adversary 1.0): can't be loaded: {why}"
    for _ in range(2):  # nor is it forgotten
        with pytest.raises(ExtensionError, match=re.escape(line)) as caught:
            families.describe(tiny_config(), "a model with indexers")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("SAME_NAME", "HYV4ForCausalLM is of the family hy_v4, expected another name"),
        ("SAME_ARCHITECTURE", "DeepseekV32ForCausalLM is of the family dsa, expected another name"),
        ("OTHER", "is object, expected Family of this version"),
        ("Greedier", "is Greedier, expected Family of this version"),
    ],
)
def test_what_another_family_has_is_not_to_be_had(install: Install, value: str, why: str) -> None:
    install("families", "mine", f"adversary_code:{value}")
    with pytest.raises(ExtensionError, match=f"^extension mine .*of indexcache.families.*: {why}"):
        families.known_families()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("older", "Older", "lacks find, expected Strategy of this version"),
        ("greedy", "Greedier", "its name is greedy, expected another name"),
        ("greedier", "Greedier", "its name is greedy, expected another name"),
        ("nameless", "Nameless", "its name is None, expected nameless"),
        ("object", "OTHER", "is object, expected Strategy of this version"),
    ],
)
def test_strategies_of_other_shapes_and_names(install: Install, name: str, value: str, why: str) -> None:
    install("strategies", name, f"adversary_code:{value}")
    with pytest.raises(ExtensionError, match=f"^extension {name} .*{why}"):
        search_strategies.strategies()


def test_one_name_twice(install: Install) -> None:
    install("strategies", "shift", "other_code:Greedier", distribution="other")
    with pytest.raises(ExtensionError, match=r"of indexcache.strategies .*: the name shift is taken twice"):
        extensions("strategies", Strategy)


def test_a_strategy_of_an_extension_is_one_of_ours(install: Install) -> None:
    code = "from indexcache_search.strategies.greedy import Greedy\nclass Mine(Greedy): name = 'mine'\n"
    install("strategies", "mine", "adversary_code:Mine", code)
    assert type(search_strategies.strategy_of("mine")).__name__ == "Mine"
    assert next(iter(search_strategies.strategies())) == search_strategies.DEFAULT_STRATEGY


def test_two_types_of_selections(install: Install) -> None:
    code = "from indexcache_dense.selection import Selection\nclass Other(Selection): pass\n"
    install("selections", "other", "adversary_code:Other", code)
    with pytest.raises(ExtensionError, match=r"other, pages of indexcache.selections: expected one alone"):
        selection_type()


def nothing(group: str, kind: type) -> dict[str, Any]:
    return {}


def test_without_an_extension_a_selection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file, dense = PatternFile.loads(text(None)), text(PAGES)
    assert PatternFile.loads(dense).selection == PAGES
    with monkeypatch.context() as without:
        without.setattr(selection, "extensions", nothing)
        PatternFile.model_rebuild(force=True)
        line = "selection needs an extension that is not installed, expected a pattern of F and S alone"
        assert PatternFile.loads(text(None)) == file
        with pytest.raises(PatternFileError, match=f"^p.yaml: selection: a {line}$"):
            PatternFile.loads(dense, "p.yaml")
        with pytest.raises(PatternError, match=line):
            Pattern.from_key(Pattern("DSS", PAGES).key)
        with pytest.raises(PatternError, match=line):
            PatternSpec.read("DSS", assume=True)
    PatternFile.model_rebuild(force=True)
    assert PatternFile.loads(dense).selection == PAGES


def text(chosen: PatternSelection | None) -> str:
    return PatternFile.model_validate(
        {
            "schema": "indexcache/v1",
            "model": {"architecture": "A", "num_layers": 3, "config_sha256": "0" * 64, "name": "a"},
            "selection": chosen,
            "pattern": "FSS" if chosen is None else "DSS",
            "retention": 1 / 3,
        }
    ).dumps()


def test_without_an_extension_its_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "extensions", nothing)
    app, seen = typer.Typer(), list[Any]()
    kind = extra.extra_option("bytes")

    def command(bytes: Any = None) -> None:
        seen.append(bytes)

    command.__annotations__["bytes"] = kind
    app.command()(command)
    assert CliRunner().invoke(app, []).exit_code == 0 and seen == [None]
    refused = CliRunner().invoke(app, ["--bytes", "0.3"])
    assert refused.exit_code == 2 and "needs an extension that is not installed" in refused.output
    assert extra.example_of("bytes") == ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    names: tuple[str, ...]
    limit: int = 3


def comparison(seen: list[Any], verdict: bool = False, **more: Any) -> ExtraComparison:
    """A comparison that notes what it is asked for."""

    def run(job: ExtraJob) -> bool:
        seen.append((job.settings, job.beside))
        return verdict

    note = {"files": ("seen.json",), "check": lambda job: seen.append("checked"), **more}
    return ExtraComparison(kind=Setting, help="Of an extension.", first="NAME,...", run=run, **note)


def test_comparisons_of_extensions_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is an option with its own settings; what one wrote is kept by the next."""
    seen = list[Any]()
    extras = {"one": comparison(seen), "two": comparison(seen, verdict=True)}
    monkeypatch.setattr(evaluate, "EXTRAS", extras)

    def command(context: typer.Context, **asked: Any) -> None:
        around = {"model": "m", "endpoints": (), "output": tmp_path, "console": messages()}
        for one, job in evaluate._extra_jobs(asked, False, **around):
            one.check(job)
            if one.run(job):
                raise typer.Exit(1)

    app = application({"indexcache-eval": extra.with_options(extras)(command)})
    done = CliRunner().invoke(app, ["--two", "a,b:limit=5", "--one", "c"])
    assert done.exit_code == 1, done.output
    assert seen == [
        *("checked", (Setting(names=("c",)), False)),
        *("checked", (Setting(names=("a", "b"), limit=5), True)),
    ]
    text = CliRunner().invoke(app, ["--help-all"]).output
    assert "--one NAME,...:KEY=VALUE" in text and "Of an extension." in text
    assert "expected --one limit=VALUE" in CliRunner().invoke(app, ["--limit", "3"]).output
    assert CliRunner().invoke(app, []).exit_code == 0 and len(seen) == 4


@pytest.mark.parametrize("name", ["context", "a-b", "class"])
def test_a_comparison_with_a_name_that_is_no_option_is_one_line(name: str) -> None:
    def command(context: typer.Context, **asked: Any) -> None: ...

    with pytest.raises(ExtensionError, match=rf"^an extension of indexcache.comparisons: .*{name}.*another name$"):
        extra.with_options({name: comparison([])})(command)


def test_files_of_a_comparison_are_the_commands_own(install: Install) -> None:
    assert re.fullmatch(ever(), "eval.json") and not re.fullmatch(ever(), "seen.json")
    code = """
from dataclasses import dataclass
from indexcache_search.eval.extra import ExtraComparison
OURS = ExtraComparison(kind=object, help="", files=("seen.json",), check=print, run=bool)
"""
    install("comparisons", "mine", "adversary_code:OURS", code)
    assert re.fullmatch(ever(), "seen.json") and not re.fullmatch(ever(), "seen-json")


def test_without_comparisons_their_options_are_unknown() -> None:
    """One line, as of any other word that is no option."""
    code = "import sys; import importlib.metadata as m; old = m.entry_points;"
    code += "m.entry_points = lambda **by: [] if by['group'] == 'indexcache.comparisons' else old(**by);"
    code += "from indexcache_search.__main__ import evaluate; sys.argv[1:] = ['--harness', 'a']; evaluate()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("indexcache-eval: No such option: --harness"), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_all_of_ours_are_found() -> None:
    assert set(extensions("comparisons", ExtraComparison)) == {"harness"}
    assert set(extensions("families", Family)) == {"dense_gqa", "minimax_m3"}
    assert set(extensions("strategies", Strategy)) >= {"recall", "shift"}
    assert set(extensions("reports", Pages)) == {"html"}
    assert set(extensions("speeds", Speeds)) == {"prompts"}
    assert set(extensions("tasks", Tasks)) == {"generated"}
    assert set(extensions("options", extra.ExtraOption)) == {"bytes", "selection", "selections", "speed", "tasks"}
    assert set(extensions("launches", Launches)) == {"sglang"}
    assert set(extensions("listings", Listing)) == {"environment", "known"}
    assert set(extensions("sources", RemoteFile)) == {"hub"} and set(extensions("folders", ResultFolder)) == {"search"}
    assert set(extensions("remarks", Remarks)) == {"overrides", "provenance"}


def test_without_a_reader_of_launch_lines_what_needs_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A server is still refused what the plugin refuses; the launcher alone has nothing to say before."""
    monkeypatch.setattr(findings, "extensions", lambda group, kind: {})
    monkeypatch.setattr(findings, "first_made", lambda group, kind: None)
    line = "needs an extension that reads launch lines (indexcache.launches): none is here"
    assert check.main(["FSSS", "--server-args", "--tp 2"]) == 2
    assert capsys.readouterr().err == f"indexcache-check: --server-args {line}\n"
    assert check.main(["--model", str(tmp_path), FLAG, '{"index_topk_freq": 2}']) == 2
    assert capsys.readouterr().err == f"indexcache-check: {FLAG} {line}\n"
    with pytest.raises(IndexCacheError, match=re.escape(line)):
        own_server.check_arguments(["--tp", "2"])
    assert own_server.check_arguments([]) == 1
    tell(PatternSpec.read("FSSS"), Asked(pattern="FSSS"), ["--enable-two-batch-overlap"])
    assert capsys.readouterr() == ("", "")
