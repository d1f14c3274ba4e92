"""`--config run.yaml`: it stands for flags, flags win, and nothing in it is ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import sglang_indexcache
from indexcache_search.cli.bounded import SEED
from indexcache_search.cli.command import Config, OptionNeed, Version, application, number, option, running, settings
from indexcache_search.cli.config import sections, server_flags

NEEDS = {"deep": (OptionNeed("--model", lambda given: bool(given["model"])),)}
found: list[dict[str, Any]] = []


@dataclass(frozen=True, kw_only=True)
class Sizes:
    pages: int = 4


def application_of(**more: Any) -> typer.Typer:
    def run(
        context: typer.Context,
        model: str | None = None,
        source: list[str] | None = None,
        seed: Annotated[int, number("Order.", SEED)] = 0,
        shares: Annotated[str, option("Shares.", metavar="SHARE,...")] = "1/2",
        sizes: Annotated[Sizes | None, settings(Sizes, "Sizes.")] = None,
        deep: Annotated[bool, option("Depth.", "--deep/--no-deep")] = True,
        output: Annotated[Path | None, option("Folder.")] = None,
        config: Config = None,
        version: Version = False,
    ) -> None:
        with running(context, NEEDS):
            flags = server_flags(context, bool(more) and model == "served")
            found.append(
                {"model": model, "source": source, "seed": seed, "shares": shares, "sizes": sizes, "deep": deep}
                | ({"flags": flags} if flags else {})
            )

    return application({"run": run}, **more)


def run(path: Path, text: str, *words: str, app: typer.Typer | None = None) -> Any:
    (path / "run.yaml").write_text(text)
    found.clear()
    return CliRunner().invoke(app or application_of(), ["--config", str(path / "run.yaml"), *words])


FILE = """\
model: m
source:
  - a
  - b
seed: 7
shares: [1/2, 1/4]
sizes: {pages: 8}
deep: false
"""


def test_a_file_stands_for_flags_which_win(tmp_path: Path) -> None:
    flags = [*("--model", "m", "--source", "a", "--source", "b", "--seed", "7"), "--no-deep"]
    assert run(tmp_path, "{}", *flags, "--shares", "1/2,1/4", "--sizes", "pages=8").exit_code == 0
    [given] = found
    assert run(tmp_path, FILE).exit_code == 0 and found == [given]
    assert run(tmp_path, FILE, "--seed", "0", "--source", "c", "--deep", "--sizes", "pages=2").exit_code == 0
    assert found == [given | {"seed": 0, "source": ["c"], "deep": True, "sizes": Sizes(pages=2)}]
    assert run(tmp_path, "source: a\nsizes: pages=8").exit_code == 0
    assert found[0]["source"] == ["a"] and found[0]["sizes"] == Sizes(pages=8)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("sed: 1", "run.yaml: sed: no such option of"),
        ("config: run.yaml", "run.yaml: config: no such option of"),
        ("tp: 8", "run.yaml: tp: no such option of"),
        ("seed: 1\nSeed: 2", "run.yaml: Seed: no such option of"),
        ("seed: many", "run.yaml: seed: "),
        ("seed: true", "run.yaml: seed: found true, expected a text or a number"),
        ("seed: -1", "run.yaml: seed: found -1, expected 0 to 9223372036854775807"),
        ("seed: [1, 2]", "run.yaml: seed: found [1, 2], expected a text or a number"),
        ('output: ""', "run.yaml: output: is empty, expected a path"),
        ("seed:", "run.yaml: seed: found null, expected a text or a number"),
        ("model: {a: 1}", 'run.yaml: model: found {"a": 1}, expected a text or a number'),
        ("deep: 1", "run.yaml: deep: found 1, expected true or false"),
        ("sizes: {page: 8}", "run.yaml: sizes: found 'page', expected pages"),
        ("sizes: {pages: x}", "run.yaml: sizes: pages: found 'x', expected a whole number"),
        ("deep: false", "run.yaml: deep needs --model"),
        ("- seed", "run.yaml: expected a mapping of option names"),
        ("seed: 1\nseed: 2", "run.yaml: line 2: key 'seed' stands there twice"),
        ("seed: &x 1", "run.yaml: line 1: anchors and aliases are not allowed"),
    ],
    ids=lambda value: value.replace("\n", " "),
)
def test_what_is_not_read_is_refused_with_file_and_key(text: str, line: str, tmp_path: Path) -> None:
    done = run(tmp_path, text)
    shown = " ".join(done.output.split())
    assert done.exit_code == 2 and line in shown.replace(f"{tmp_path}/", "") and not found, done.output


def test_sections_are_of_the_commands_that_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in another's is not looked at, its own and what stands outside counts, and no key twice."""
    assert sections() == ("distill", "eval", "offload", "search", "watch")
    monkeypatch.setattr("indexcache_search.cli.config.sections", lambda: ("other", "run"))
    assert run(tmp_path, "seed: 3\nother: {nothing: of ours}\nrun: {model: m}").exit_code == 0
    assert (found[0]["model"], found[0]["seed"]) == ("m", 3)
    for text, line in (
        ("seed: 3\nrun: {seed: 4}", "run: seed stands outside of the section, too"),
        ("other: [1]", "other: expected a mapping of option names"),
        ("watching: {seed: 4}", "watching: no such option of run"),
    ):
        refused = run(tmp_path, text)
        assert refused.exit_code == 2 and line in re.sub(r"\s+", " ", refused.output), refused.output


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(application_of(), ["--config", str(tmp_path / "none.yaml")])
    assert done.exit_code == 2 and "none.yaml: No such file" in done.output and not found


@pytest.mark.parametrize("command", ["search", "eval", "distill", "offload", "watch"])
def test_each_command_has_a_section_that_others_do_not_read(command: str, tmp_path: Path) -> None:
    assert run(tmp_path, f"model: m\n{command}: {{nothing: 1}}").exit_code == 0 and found[0]["model"] == "m"
    (tmp_path / "run.yaml").write_text(f"{command}: {{model: n}}")
    words = ["--config", str(tmp_path / "run.yaml")]
    assert CliRunner().invoke(application_of(), words, prog_name=f"indexcache-{command}").exit_code == 0
    assert found[1]["model"] == "n"


def test_flags_of_a_server_come_from_both(tmp_path: Path) -> None:
    app = application_of(allow_extra_args=True, ignore_unknown_options=True)
    assert run(tmp_path, "model: served\ntp: 8\ndisable_overlap: true", "--page-size", "64", app=app).exit_code == 0
    assert found[0]["flags"] == ("--tp", "8", "--disable-overlap", "--page-size", "64")
    done = run(tmp_path, "tp: 8", app=app)
    assert done.exit_code == 2 and "run.yaml: no such option: --tp" in done.output
    assert "a flag of SGLang's server is taken with --engine sglang" in " ".join(done.output.split())


def test_help_has_groups_and_the_version_is_told() -> None:
    text = CliRunner().invoke(application_of(), ["--help-all"]).output
    assert (
        text.index("Model:") < text.index("--model") < text.index("Data:") < text.index("--seed") < text.index("Run:")
    )
    assert "[default: 0]" in text
    done = CliRunner().invoke(application_of(), ["--version"])
    assert done.exit_code == 0 and done.output.split()[-1] == sglang_indexcache.__version__


# -- paths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~/x", "/home/somebody/x"),
        ("~", "/home/somebody"),
        ("${PLACE}/x", "/data/x"),
        ("$PLACE/x", "/data/x"),
        ("a/$PLACE_OF_MINE-${PLACE}", "a/mine-/data"),
        ("costs $$5, $5 and ~", "costs $5, $5 and ~"),
        ("owner/name:subset", "owner/name:subset"),
    ],
)
def test_paths_are_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    """Before, `output: ~/x` made a folder that is called ~."""
    for name, value in (("HOME", "/home/somebody"), ("PLACE", "/data"), ("PLACE_OF_MINE", "mine")):
        monkeypatch.setenv(name, value)
    assert run(tmp_path, f"model: '{text}'\nsource: [a, '{text}']\n").exit_code == 0
    assert found[0]["model"] == expected and found[0]["source"] == ["a", expected]
    assert (
        run(
            tmp_path,
            f"model: served\ntp: '{text}'\n",
            app=application_of(allow_extra_args=True, ignore_unknown_options=True),
        ).exit_code
        == 0
    )
    assert found[0]["flags"] == ("--tp", expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("$NOWHERE/x", "model: the variable NOWHERE is not set, or empty"),
        ("a/${NOWHERE}", "model: the variable NOWHERE is not set, or empty"),
        ("${EMPTY}/x", "model: the variable EMPTY is not set, or empty"),
        ("${HOME:-/tmp}/x", "model: found '${HOME:-/tmp}', expected one like ${HOME}"),
        ("${HOME", "model: found '${HOME', expected"),
        ("~nobody-of-that-name/x", "model: found '~nobody-of-that-name/x', and there is no such home folder"),
    ],
)
def test_paths_that_mean_nothing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setenv("EMPTY", "")
    result = run(tmp_path, f"model: '{text}'\n")
    assert result.exit_code == 2 and not found
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())
