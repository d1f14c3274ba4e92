"""Patterns that others published: they load, they are nested, and a copy onto another model is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indexcache_published.known import KnownPattern, known_patterns
from indexcache_published.warnings import evenly_spaced, provenance, warnings_about
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.check import main
from sglang_indexcache.io.errors import PatternFileError
from tests.conftest import tiny_config
from tests.core.test_pattern_file import GOOD

GLM, DEEPSEEK = "GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"
VLLM = "FFSFSSSFSSFFFSSSFFFSFSSSSSSFFSFFSFFSSFFFFFFSFFFFFSFFSSSSSSFSF"  # vLLM docs/features/index_cache.md
HALF, QUARTER = known_patterns()


@pytest.fixture
def glm(tmp_path: Path) -> str:
    """A model of GLM-5's depth."""
    return model(tmp_path / "glm", tiny_config(layers=78))


def model(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines of a check that finds no problem."""
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_the_published_files_are_those_of_their_sources() -> None:
    """40 of 78 layers F in the README of THUDM/IndexCache, 22 in SGLang's pull request 21925."""
    assert [(known.path.name, known.kept) for known in (HALF, QUARTER)] == [
        ("glm-5-half.yaml", "40 of 78"),
        ("glm-5-quarter.yaml", "22 of 78"),
    ]
    for known in (HALF, QUARTER):
        assert known.path.read_text() == known.file.dumps()
        assert known.file.model.model_dump(exclude_defaults=True) == {
            "architecture": GLM,
            "num_layers": 78,
            "name": "GLM-5",
        }


def test_the_published_patterns_are_nested_and_unverified() -> None:
    assert {*QUARTER.pattern.full_layers} < {*HALF.pattern.full_layers}
    for known in (HALF, QUARTER):
        assert known.published.verified is False and str(known.published).endswith(", not verified here")


def test_the_letters_of_vllms_docs_are_the_first_of_glm_5s() -> None:
    assert HALF.pattern.roles.startswith(VLLM) and len(VLLM) == 61
    [line] = warnings_about(Pattern(VLLM), None, DEEPSEEK)
    assert line == (
        "the 61 letters are the first 61 of the 78 letters of glm-5-half.yaml (THUDM, for GLM-5, 40 of 78 F): found for"
        " the layers of GlmMoeDsaForCausalLM; expected a search on this model"
    )
    assert [line] == list(warnings_about(Pattern(VLLM), None, None))


def test_a_copy_is_a_warning_and_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v32 = model(tmp_path / "v32", tiny_config("deepseek_v32", layers=61))
    lines = checked(capsys, VLLM, "--model", v32)
    assert lines[-2].startswith("warning: the 61 letters are the first 61 of") and lines[-1] == "no problems"
    assert main([VLLM, "--model", v32, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == 1


def test_all_letters_on_a_model_of_another_architecture() -> None:
    [line] = warnings_about(HALF.pattern, None, DEEPSEEK)
    assert line.startswith("the 78 letters are all of the 78 letters of glm-5-half.yaml")
    assert not list(warnings_about(HALF.pattern, None, GLM)) and not list(warnings_about(HALF.pattern, None, None))


def test_a_few_letters_may_be_alike_by_chance() -> None:
    assert len(list(warnings_about(Pattern(VLLM[:16]), None, DEEPSEEK))) == 1
    assert not list(warnings_about(Pattern(VLLM[:15]), None, DEEPSEEK))
    assert not list(warnings_about(Pattern(VLLM[:-1] + "S"), None, DEEPSEEK))


def test_a_published_pattern_is_served_as_what_it_is(glm: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It fits every model of its architecture and depth, and a note says that nobody verified it here."""
    lines = checked(capsys, str(HALF.path), "--model", glm)
    assert "note: the pattern was published by THUDM, not verified here (README of" in "\n".join(lines)
    assert not any(line.startswith("warning") for line in lines)
    lines = checked(capsys, QUARTER.pattern.letters, "--model", glm)
    assert [line for line in lines if "published, not verified here" in line] == [
        "note: the letters are those of glm-5-quarter.yaml (mmangkad, for GLM-5, 22 of 78 F): published, not verified"
        " here"
    ]
    assert not list(provenance(Pattern("FSSS" * 4), None, GLM))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tiny_config(layers=77), "model.num_layers: file has 78, other has 77"),
        (tiny_config("deepseek_v32", layers=78), f"model.architecture: file has {GLM}, other has {DEEPSEEK}"),
        (
            tiny_config(layers=78, indexer_types=["full"] * 2 + ["shared"] * 76),
            r"model.locked_layers: file has \[\], other has \[2, 3,",
        ),
    ],
)
def test_a_published_pattern_is_bound_to_its_model(
    config: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(HALF.path), "--model", model(tmp_path / "other", config)]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert any(message.replace("\\", "") in line for line in lines), lines


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("verified: false", "verified: true", "published.verified: found True, expected: False"),
        ("  verified: false\n", "", "published.verified: missing"),
        ("date: '2026-03-14'", "date: spring", "published.date: found 'spring'"),
        ("published:", "published:\n  likes: 7", "published.likes: unknown key"),
        ("verified: false\n", f"verified: false\n{GOOD[GOOD.index('search:') : GOOD.index('calib')]}", "stands beside"),
    ],
)
def test_what_published_says_is_read_strictly(old: str, new: str, message: str) -> None:
    with pytest.raises(PatternFileError) as caught:
        PatternFile.loads(HALF.path.read_text().replace(old, new))
    assert message in str(caught.value)


def test_without_a_publisher_a_file_says_for_which_config_it_is(tmp_path: Path) -> None:
    text = HALF.path.read_text()
    (tmp_path / "p.yaml").write_text(text[: text.index("published:")])
    with pytest.raises(PatternFileError, match=r"p.yaml: model.config_sha256: missing, expected the digest"):
        PatternFile.load(tmp_path / "p.yaml")
    pattern_file(Pattern("FSSFSS"), tiny_config()).save(tmp_path / "own.yaml")
    with pytest.raises(PatternFileError, match="published is missing"):
        KnownPattern.load(tmp_path / "own.yaml")


def test_a_greedy_search_has_nested_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = PatternFile.loads(GOOD)
    assert not list(warnings_about(file.as_pattern(), file, GLM))
    other = file.model_copy(update={"patterns": {"1/8": "FSSSSSSS", "1/2": "FSFSFFSS"}})
    assert not list(warnings_about(other.as_pattern(), other, GLM))
    other = file.model_copy(update={"patterns": {"1/4": "FFSSSSSS"}})
    [line] = warnings_about(other.as_pattern(), other, GLM)
    assert line == (
        "the search is called greedy, but the pattern with 2 F layers keeps layer 1, which the one with 3 shares;"
        " expected nested patterns"
    )
    assert other.search is not None
    lazy = other.model_copy(update={"search": other.search.model_copy(update={"strategy": "lazy"})})
    assert not list(warnings_about(lazy.as_pattern(), lazy, GLM))
    other.save(tmp_path / "p.yaml")
    lines = checked(capsys, str(tmp_path / "p.yaml"), "--server-args", "--tp 8")
    assert lines[0] == f"warning: {line}"


@pytest.mark.parametrize("text", ["uniform@1/4", "FSSS" * 19 + "FS", "FFSSS" + "FSSS" * 18 + "F"])
def test_a_uniform_pattern_drops_what_a_search_kept(text: str, glm: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = checked(capsys, text, "--model", glm)
    [line] = [line for line in lines if line.startswith("warning: ")]
    assert line.startswith("warning: the pattern is uniform and shares layers ")
    assert "which glm-5-quarter.yaml (mmangkad, for GLM-5, 22 of 78 F) keeps" in line


def test_uniform_is_compared_with_the_search_of_about_as_many_layers(
    glm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = len({*HALF.pattern.full_layers} - {*Pattern.uniform(78, 2).full_layers})
    [line] = [line for line in checked(capsys, "uniform@1/2", "--model", glm) if line.startswith("warning: ")]
    assert "glm-5-half.yaml" in line and f" and {dropped - 8} more, which" in line
    small = model(tmp_path / "small", tiny_config())
    assert not any(line.startswith("warning: ") for line in checked(capsys, "uniform@1/2", "--model", small))


@pytest.mark.parametrize("text", ["uniform@1/4", "uniform@1/8", "native"])
def test_a_model_is_not_told_to_take_what_it_can_not_take(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GLM-5.2 has the architecture and depth of GLM-5, and no indexers where patterns of GLM-5 keep F."""
    types = ["full" if layer < 3 or layer % 4 == 2 else "shared" for layer in range(78)]
    glm_5_2 = model(tmp_path / "glm-5.2", tiny_config(layers=78, indexer_types=types))
    letters = "".join("F" if word == "full" else "S" for word in types) if text == "native" else text
    assert not any(line.startswith("warning: ") for line in checked(capsys, letters, "--model", glm_5_2))
    file = pattern_file(Pattern("F" + "S" * 77), tiny_config(layers=78, indexer_types=types))
    assert file.model.locked_layers and not list(warnings_about(Pattern.uniform(78, 4), file, GLM))


@pytest.mark.parametrize(
    ("roles", "even"),
    [
        ("FSSSFSSSFSSSFSSS", True),
        ("FFSSSFSSSFSSSFSS", True),
        ("FSSSFSSSFSSSFSSSS", False),
        ("FSFFSSFSFS", False),
        ("FFFFFFFF", False),
        ("FSSSSFSS", False),
        ("FSSSSSSFSSFSSFSS", False),
    ],
)
def test_even_spacing(roles: str, even: bool) -> None:
    assert evenly_spaced(Pattern(roles)) is even


def test_known_lists_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    lines = checked(capsys, "--known")
    for known in (HALF, QUARTER):
        place = lines.index(str(known.path))
        assert known.pattern.letters in lines[place + 2] and "not verified here" in lines[place + 4]
    assert main(["--known", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [item["published"]["verified"] for item in listed] == [False, False]
    assert [item["path"] for item in listed] == [str(HALF.path), str(QUARTER.path)]
