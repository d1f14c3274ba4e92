"""Launch lines: nothing that changes attention is passed over, however it is spelled."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

import indexcache_launch.options as options_module
from extras.launch.tests.launch_lines import as_text, mutations
from indexcache_launch import config_file, launch_line
from indexcache_launch.combinations import COMBINATIONS, PLAIN
from indexcache_launch.harmless import HARMLESS
from indexcache_launch.judge import judge, verdicts
from indexcache_launch.launch_line import LaunchLine, Readings, split_text
from indexcache_launch.options import OptionError, parser_of, versions
from sglang_indexcache import Pattern
from sglang_indexcache.families.combination import NOT_RUN, UNJUDGED
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.sglang.meaning import SOURCES, Meaning
from sglang_indexcache.sglang.probes import SglangSource

SHARED = Pattern("FSSFSS")
NEWEST = versions()[-1]
OPTIONS: list[dict[str, Any]] = json.loads(
    Path(options_module.__file__).with_name("options.json").read_text(encoding="utf-8")
)["options"]


def plain_parser(version: str) -> argparse.ArgumentParser:
    """A parser of the table's names alone, which keeps values as they are."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, argument_default=argparse.SUPPRESS)
    for option in OPTIONS:
        if version in option["versions"]:
            if option["action"] == "boolean":
                parser.add_argument(*option["names"], dest=option["dest"], action=argparse.BooleanOptionalAction)
                continue
            words = {"store": option.get("nargs"), "old store": None, "list": "*"}
            none = option["action"] not in words and "choices" not in option
            parser.add_argument(
                *option["names"],
                dest=option["dest"],
                **({"action": "store_true"} if none else {"nargs": words.get(option["action"])}),
            )
    return parser


def of_all_versions(line: str) -> dict[str, str]:
    """Verdicts and notes of a line of which nothing but the words is known, on a CPU."""
    found = judge(SHARED, DSA, Readings.of([*line.split(), "--device", "cpu"], None))
    return {item.name: item.state for item in found.verdicts}


def spoken_of(line: LaunchLine) -> set[str]:
    """The attributes that the verdicts of a line speak of."""
    by_name = {item.name: item.reads for item in COMBINATIONS if item.asked(Meaning(line))}
    flags = {name: option["dest"] for option in OPTIONS for name in option["names"]}
    found: set[str] = set()
    for verdict in verdicts(SHARED, DSA, line):
        for read in by_name.get(verdict.name, ()):
            found |= {read, *SOURCES.get(read, ())}
        text = f"{verdict.name} {verdict.why}".replace(",", " ").replace(")", " ")
        found |= {flags[word] for word in text.split() if word in flags}
        found |= {word.removeprefix("--no-").removeprefix("--").replace("-", "_") for word in text.split()}
    return found


def test_a_thousand_lines_are_never_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Today's parser of words is held against argparse itself, with the names of one version after the other."""
    monkeypatch.chdir(tmp_path)
    parsers = {version: plain_parser(version) for version in versions()}
    refused = spoken = 0
    for number, (words, content) in enumerate(mutations(1000, random.Random(7))):
        version = versions()[number % len(versions())]
        if content is not None:
            (tmp_path / "server.yaml").write_text(yaml.safe_dump(content))
        line = LaunchLine.parse(words, parser_of(version))
        try:
            merged = config_file.merged(words, parser_of(version))
            expected, left = parsers[version].parse_known_args(merged)
        except (OptionError, argparse.ArgumentError, SystemExit):
            refused += 1
            assert line.unread, (version, words)
            assert UNJUDGED in {item.state for item in verdicts(SHARED, DSA, line)}
            continue
        if left:
            assert line.unread, (version, words, left)
        named = " ".join(item.name for item in line.unread)
        told = spoken_of(line)
        for name in vars(expected):
            attribute = {"tensor_parallel_size": "tp_size", "data_parallel_size": "dp_size"}.get(name, name)
            attribute = {"pipeline_parallel_size": "pp_size"}.get(attribute, attribute)
            if attribute == "config" or attribute in HARMLESS or attribute in line.plain:
                continue
            if attribute not in line.given:  # a value that the parser refuses, with the flag's name
                assert "--" in named, (version, words, name)
            elif line.given[attribute] not in PLAIN.get(attribute, ()):
                spoken += 1
                assert attribute in told, (version, words, name, told)
    assert refused > 100 and spoken > 1000


def test_a_thousand_lines_of_a_shell_are_split_into_their_words() -> None:
    """Whatever is in front of a line, or how it is quoted, its variables are judged and no word is lost."""
    rng = random.Random(11)
    names = ("SGLANG_DISABLE_DSA_INDEXER_FUSION", "SGLANG_USE_SM90_LITETOPK", "SGLANG_OPT_USE_TOPK_V2", "CUDA_HOME")
    for words, _ in mutations(1000, rng):
        variables = {name: rng.choice(("1", "a b")) for name in rng.sample(names, rng.randint(0, 2))}
        if not words:
            continue
        assert split_text(as_text(words, variables, rng)) == (variables, words)
        line = LaunchLine.parse(words)
        told = {item.name for item in verdicts(SHARED, DSA, line, variables=variables)}
        assert told >= variables.keys() - {"CUDA_HOME"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--lala 3", {"--lala": UNJUDGED}),
        ("--enable", {"--enable": UNJUDGED}),
        ("--enable_two_batch_overlap", {"--enable_two_batch_overlap": UNJUDGED}),
        ("--tp-size", {"--tp-size": UNJUDGED}),
        ("--tp-size 1 2", {"--tp-size": UNJUDGED}),
        ("stray --tp-size 1", {"the first words": UNJUDGED}),
        ("-tp 8", {"a word that begins with -": UNJUDGED}),
        ("--config=server.yaml", {"--config": UNJUDGED}),
        ("--config", {"--config": UNJUDGED}),
        ("--config missing.yaml", {"--config": UNJUDGED}),
        ("--config server.json", {"--config": UNJUDGED}),
    ],
)
def test_what_sglang_would_not_read_is_named(line: str, expected: dict[str, str]) -> None:
    words = line.split()
    found = judge(SHARED, DSA, Readings.of(["--device", "cpu", *words], None))
    if words[0] == "stray":
        found = judge(SHARED, DSA, Readings.of([*words, "--device", "cpu"], None))
    assert {item.name: item.state for item in found.verdicts} == expected
    assert len(found.problems) == 1 and found.problems[0].startswith("could not be judged: ")


def test_values_behind_unread_flags_are_not_shown() -> None:
    """They may be keys: `-sk-1` looks like a flag to argparse."""
    found = judge(SHARED, DSA, Readings.of(["--api-key", "-sk-123456", "--apikey", "sk-123456"], None))
    assert found.problems and "123456" not in " ".join([*found.problems, *found.lines])


def test_where_versions_disagree_it_is_said() -> None:
    old = judge(SHARED, DSA, Readings.of("--enable-nsa-prefill-context-parallel --device cpu".split(), None))
    assert [item.name for item in old.verdicts] == ["context-parallel prefill"] and not old.problems
    assert old.notes == (
        "note: read as SGLang 0.5.11 to 0.5.17 does: 0.5.20 to 0.5.23 would not read"
        " --enable-nsa-prefill-context-parallel",
    )
    both = judge(SHARED, DSA, Readings.of("--attn-dp-size 8 --lala".split(), None))
    assert "read as SGLang 0.5.23 does" in both.notes[0] and both.problems == [
        "could not be judged: --lala (no such flag)"
    ]
    assert not judge(SHARED, DSA, Readings.of(["--tp", "8"], None)).notes


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"tp-size": 8, "trust-remote-code": True}, ["--tp-size", "8", "--trust-remote-code"]),
        ({"enable-mixed-chunk": False, "dtype": "auto"}, ["--dtype", "auto"]),
        ({"cuda-graph-bs-decode": [1, 2], "hisparse-config": {"a": 1}}, None),
        ({"enable-dp-attention": True}, OptionError),
        ({"tensor_parallel_size": 4}, ["--tensor_parallel_size", "4"]),
        ([1], OptionError),
        ("tp-size: [", OptionError),
        ({3: 4}, OptionError),
        (None, []),
    ],
)
def test_a_file_of_flags_is_read_as_sglang_does(tmp_path: Path, content: Any, words: Any) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content if isinstance(content, str) else "" if content is None else yaml.safe_dump(content))
    given = ["--pp-size", "2", "--config", str(path), "--tp-size", "4"]
    if words is OptionError:
        with pytest.raises(OptionError, match=r"--config .*server\.yaml"):
            config_file.merged(given, parser_of(NEWEST))
        return
    found = config_file.merged(given, parser_of(NEWEST))
    if words is not None:
        assert found == [*words, "--pp-size", "2", "--tp-size", "4"]
    else:
        assert found[:5] == ["--cuda-graph-bs-decode", "1", "2", "--hisparse-config", '{"a": 1}']
    assert LaunchLine.parse(given, parser_of(NEWEST)).pp_size == 2


def test_flags_on_the_line_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("tp-size: 8\nenable-two-batch-overlap: true\nspeculative-algorithm: EAGLE\nmodel-path: x\n")
    line = LaunchLine.parse(["--config", str(path), "--tp-size", "2"])
    assert line.given == {
        "tp_size": 2,
        "enable_two_batch_overlap": True,
        "speculative_algorithm": "EAGLE",
        "model_path": "x",
    }
    assert judge(SHARED, DSA, Readings.of(["--config", str(path)], None)).problems


@pytest.mark.parametrize(
    ("text", "variables", "words"),
    [
        ("--tp 8 \\\n --dp 8", {}, ["--tp", "8", "--dp", "8"]),
        ("A=1 B='x y' python3 -m sglang.launch_server --tp '8'", {"A": "1", "B": "x y"}, ["--tp", "8"]),
        ("env A=1 sglang serve --model-path m", {"A": "1"}, ["--model-path", "m"]),
        ("A=1 --tp 8", {"A": "1"}, ["--tp", "8"]),
        ("--served-model-name serve --model-path a=b", {}, ["--served-model-name", "serve", "--model-path", "a=b"]),
        ("", {}, []),
    ],
)
def test_lines_are_split_as_a_shell_does(text: str, variables: dict[str, str], words: list[str]) -> None:
    assert split_text(text) == (variables, words)


def test_an_open_quote_is_one_line() -> None:
    with pytest.raises(IndexCacheError, match="No closing quotation"):
        split_text("--tp 8 '")


def test_every_name_of_the_lists_is_one_of_sglang() -> None:
    """A misspelled name would let a flag pass, or never be read."""
    known = {option["dest"] for option in OPTIONS} | set().union(*SOURCES.values()) | set(SOURCES)
    known |= {"tp_size", "dp_size", "pp_size", "ep_size", "moe_dp_size", "attn_cp_size", "help"}
    assert known >= HARMLESS
    assert known >= {read for item in COMBINATIONS for read in item.reads}
    assert not HARMLESS & {read for item in COMBINATIONS for read in item.reads}


def test_flags_that_nobody_judged_are_not_run() -> None:
    """A flag of a next version falls into this, unless somebody writes down what it does."""
    others = [
        option
        for option in OPTIONS
        if NEWEST in option["versions"] and option["action"] == "true" and option["dest"] not in HARMLESS
    ]
    assert len(others) > 80
    for option in others:
        assert of_all_versions(option["names"][0]), option["dest"]
    assert of_all_versions("--enable-kv-cache-sharding") == {"--enable-kv-cache-sharding": NOT_RUN}


def test_an_sglang_that_the_table_lacks_is_said(tmp_path: Path) -> None:
    """Between two versions of the table flags come and go: what is not known is no silence."""
    for version, doubts in (("0.5.20", 0), ("0.5.21", 1)):
        root = tmp_path / version / "sglang"
        (root / "srt").mkdir(parents=True)
        (root.parent / f"sglang-{version}.dist-info").mkdir()
        found = judge(SHARED, DSA, Readings.of(["--tp-size", "2"], SglangSource.at(root)))
        assert len(found.notes) == doubts and all(
            f"options of SGLang {version} are not" in note for note in found.notes
        )


def test_a_parser_that_can_not_be_imported_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    source = SglangSource(tmp_path / "sglang", NEWEST)
    monkeypatch.setattr(SglangSource, "installed", classmethod(lambda cls: source))
    monkeypatch.setattr(launch_line, "installed_parser", lambda version: None)
    found = judge(SHARED, DSA, Readings.of(["--enable-two-batch"], source))
    assert "can't be imported here" in found.notes[0] and found.problems
