"""One grammar for patterns, wherever one is named."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.check import main
from sglang_indexcache.families import describe
from sglang_indexcache.families.dsa.override import indexer_types
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.messages import BEGINS_SHARED, NO_INDEXER, OTHER_LENGTH
from sglang_indexcache.pattern_file.pattern_name import PatternSpec, spells_letters, split_name
from sglang_indexcache.serving.request import wanted
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.requested import Request
from tests.conftest import save_model, tiny_config

MODEL = describe(tiny_config(), "glm")
HALF, THIRD = Fraction(1, 2), Fraction(1, 3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = pattern_file(Pattern("FSFSFS"), tiny_config())
    file = file.model_copy(update={"patterns": {"1/2": "FSFSFS", "1/3": "FSSFSS"}})
    file.save(tmp_path / "deploy.yaml")
    return tmp_path / "deploy.yaml"


def test_every_form(path: Path) -> None:
    named = {
        str(path): ("FSFSFS", [(HALF, "FSFSFS"), (THIRD, "FSSFSS")]),
        f"{path}@1/3": ("FSSFSS", [(THIRD, "FSSFSS")]),
        "uniform@1/3": ("FSSFSS", [(THIRD, "FSSFSS")]),
        "FFSFSS": ("FFSFSS", [(HALF, "FFSFSS")]),
    }
    for text, (roles, by_retention) in named.items():
        spec = PatternSpec.read(text)
        assert spec.pattern(MODEL) == Pattern(roles)
        assert [(kept, found.roles) for kept, found in spec.by_retention(MODEL, [HALF, THIRD])] == by_retention
    with pytest.raises(PatternError, match=f"^{path}: .*; expected {path}@RETENTION, or --retain"):
        PatternSpec.read(str(path)).by_retention(MODEL, [HALF, Fraction(1, 6)])


def test_names_and_labels(path: Path) -> None:
    assert split_name("prod=FSSS") == ("prod", "FSSS") and split_name("FSSS") == (None, "FSSS")
    assert split_name("runs/lr=0.1/p.yaml@1/4") == (None, "runs/lr=0.1/p.yaml@1/4")
    labels = {str(path): "deploy", f"{path}@1/3": "deploy", "uniform@1/3": "uniform", "FFSFSS": "letters"}
    assert {text: PatternSpec.read(text).label for text in labels} == labels


def test_a_file_whose_name_is_all_letters_needs_its_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("FFSS"))
    monkeypatch.chdir(path.parent)
    assert PatternSpec.read("FFSS").letters == Pattern("FFSS")
    assert PatternSpec.read("./FFSS@1/3").pattern(MODEL) == Pattern("FSSFSS")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Is a directory|No such file|not a regular file"),
        ("SFFF", BEGINS_SHARED),
        ("FFSFS", OTHER_LENGTH.format(5, 6)),
        ("uniform@half", "retention is 'half'"),
        ("uniform@2/3", "retentions of the form 1/n, found 2/3"),
        ("uniform", "^uniform: no such file, and not letters of a pattern; expected FILE"),
        ("FSXF@1/2", "^FSXF@1/2: no such file, and not letters"),
        ("nothing.yaml@1/2", "nothing.yaml"),
    ],
)
def test_mistakes_are_one_line(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IndexCacheError, match=message) as error:
        PatternSpec.read(text).pattern(MODEL)
    assert "\n" not in str(error.value)


def test_a_pattern_of_another_model_or_on_a_locked_layer_is_refused(path: Path) -> None:
    other = describe(tiny_config(hidden_size=64), "other")
    with pytest.raises(IndexCacheError, match="hidden_size is 48 in the file, 64 in other"):
        PatternSpec.read(str(path)).pattern(other)
    locked = describe(tiny_config(indexer_types=indexer_types(Pattern("FFSFFF"))), "locked")
    with pytest.raises(IndexCacheError, match=f"F for layer 2, but the checkpoint has {NO_INDEXER}"):
        PatternSpec.read("FSFSFS").pattern(locked)
    assert PatternSpec.read("uniform@1/2").pattern(locked) == Pattern("FFSSFS")


def test_serving_takes_files_and_letters(path: Path) -> None:
    def read(text: str) -> PatternSpec | None:
        return wanted(Request(asked=Asked(pattern=text)))

    of_file, letters = read(f"{path}@1/3"), read("FSSFSS")
    assert of_file is not None and of_file.known() == Pattern("FSSFSS")
    assert letters is not None and (letters.known(), letters.file) == (Pattern("FSSFSS"), None)
    with pytest.raises(IndexCacheError, match="uniform@1/3 depends on the model's layers, expected a pattern file"):
        read("uniform@1/3")


def test_check_takes_every_form(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tiny_config(), tmp_path / "model")
    for text in (f"{path}@1/3", "uniform@1/3", "FSSFSS"):
        assert main([text, "--model", str(model), "--json"]) == 0
        assert '"pattern": "FSSFSS"' in capsys.readouterr().out
    assert main(["FSSFS", "--model", str(model)]) == 1
    assert "problem: pattern has 5 letters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ffsfss", "ffsfss: letters of patterns are capitals, and there is no such file; expected FFSFSS"),
        ("FfsFsS", "expected FFSFSS"),
        ("ffsf+1Q16", r"expected FFSF\+1q16"),
        ("FFSF+1Q16", r"expected FFSF\+1q16"),
        ('"FFSFSS"', "pattern is '\"FFSFSS\"', quotes or white space and all; expected FFSFSS"),
        (" FFSFSS", "expected FFSFSS"),
        ("FFSFSS\n", "expected FFSFSS"),
        ("\ufeffFFSFSS\r\n", "expected FFSFSS$"),
        ("'uniform@1/4'", "expected uniform@1/4"),
        ("\u201cp.yaml\u201d", "expected p.yaml"),
        ('"p.yaml"@1/4', "expected p.yaml@1/4"),
        ('["F","S","S","S"]', "a pattern is its letters side by side, and nothing else; expected FSSS$"),
        ('["full", "shared"]', "expected FS$"),
        ("F,S,S", "expected FSS$"),
        ("F S S\nF S S", "expected FSSFSS$"),
        ("full,shared,shared", "expected FSS$"),
        ("f-s-s", "expected FSS$"),
        ("index_topk_pattern=FSSS", "expected FSSS$"),
        ('{"index_topk_pattern": "FSSS"}', "expected FSSS$"),
        ('"F,S+0q16"', r"expected FS\+0q16$"),
    ],
)
def test_letters_and_quotes_that_are_not_meant_so(text: str, message: str) -> None:
    with pytest.raises(PatternError, match=message) as error:
        PatternSpec.read(text)
    meant = str(error.value).rpartition("expected ")[2]
    if spells_letters(meant):
        assert PatternSpec.read(meant).known().letters == meant  # what is expected is not refused in turn


def test_files_with_odd_names_are_files(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    for name in ("ffss", "it's.yaml", '"quoted"'):
        path.with_name(name).write_bytes(path.read_bytes())
        assert str(PatternSpec.read(name).known()) == "FSFSFS"
        assert str(PatternSpec.read(f"{name}@1/3").known()) == "FSSFSS"
