"""Layers that choose among candidates: what SGLang selects is what the definition does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from dsa_cpu_platform import recorder
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa import candidates, placing
from tests.live import models
from tests.live.inprocess import _ended, call, generate, launch, load_runner
from tests.live.reference import check_selections, load_reference, selections
from tests.live.selecting import in_blocks, random_prompts, serve_a_branch
from tests.patterns import write_pattern

pytestmark = pytest.mark.sglang

STEPS = 5
LENGTHS = (260, 120, 110, 100, 90, 80, 10)
MOST = 0.05  # of a sequence's selections differ where rounding decided one
PATTERNS = {
    "glm-moe": ("FCSFSC+1c2+5c4", "FCCSFF+1c2+2c3+4q4"),
    "deepseek-v3.2": ("FCSFSC+1c2+5c1",),
}


@pytest.mark.parametrize(("kind", "letters"), [(kind, text) for kind, texts in PATTERNS.items() for text in texts])
def test_served_selections_are_the_definitions(kind: str, letters: str, tmp_path: Path) -> None:
    """A batch of mixed lengths, one of them with nothing to choose, and decoded tokens; beside a layer in blocks."""
    folder, pattern, record = models.build(kind, tmp_path / kind), Pattern.parse(letters), tmp_path / "record"
    record.mkdir()
    file = write_pattern(pattern, folder, tmp_path / "pattern.yaml")
    answers, model = generate(folder, file, random_prompts(*LENGTHS), STEPS, record), load_reference(folder)
    runs, same = recorder.read(record), 0
    for index, served in enumerate(answers):
        prompt = None
        if any(indexer.queries for indexer in pattern.indexers):
            prompt = in_blocks([(0, served.prompt)], len(served.ids) - 1, pattern, model.config.index_topk)
        same += check_selections(model, pattern, served, [str(index)], runs, prompt, MOST)
    assert same >= len(LENGTHS) - 2
    assert {run.mode for run in recorder.indexers(runs)} == {"EXTEND", "DECODE"}


@pytest.mark.parametrize(("letters", "plain"), [("FCFSFF+1c4", "FFFSFF"), ("FCFSFF+1c1", "FSFSFF")])
def test_all_candidates_are_f_and_one_times_is_s(letters: str, plain: str, tmp_path: Path) -> None:
    """With as many candidates as tokens a C layer selects what F does; with index_topk of them, what S has."""
    folder = models.build("glm-dense", tmp_path / "glm")
    found = []
    for number, text in enumerate((letters, plain)):
        record = tmp_path / f"record{number}"
        record.mkdir()
        file = write_pattern(Pattern.parse(text), folder, tmp_path / f"{number}.yaml")
        [served] = generate(folder, file, random_prompts(60), STEPS, record)  # 64 = 4 x index_topk with what is written
        found.append((served, selections(recorder.read(record), ["0"])))
    (first, mine), (second, theirs) = found
    assert first.ids == second.ids
    for layer in (0, 1, 2, 4, 5):
        assert mine[layer] == theirs[0 if plain[layer] == "S" else layer]


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    """Fewer candidates than the pattern says are seen."""
    folder, record = models.build("glm-dense", tmp_path / "glm"), tmp_path / "record"
    record.mkdir()
    file = write_pattern(Pattern.parse("FSCFSF+2c2"), folder, tmp_path / "pattern.yaml")
    [served] = generate(folder, file, random_prompts(333), STEPS, record)
    with pytest.raises(AssertionError):
        other = Pattern.parse("FSCFSF+2c3")
        check_selections(load_reference(folder), other, served, ["0"], recorder.read(record), most=MOST)


@pytest.mark.slow
def test_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, pattern = models.build("glm-moe", tmp_path / "glm"), Pattern.parse("FCSFCS+1c2+4c3")
    first, second, runs = serve_a_branch(folder, pattern, tmp_path, STEPS)
    assert "serves fingerprint" in capsys.readouterr().out
    model = load_reference(folder)
    check_selections(model, pattern, first, ["first"], runs, most=MOST)
    check_selections(model, pattern, second, ["first", "second"], runs, most=MOST)


@pytest.mark.parametrize("flag", ["--enable-hisparse", "--speculative-algorithm=EAGLE"])
def test_what_does_not_go_together(flag: str, tmp_path: Path) -> None:
    folder = models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(Pattern.parse("FFCFFF+2c4"), folder, tmp_path / "pattern.yaml")
    code, lines = launch(["--indexcache-pattern", file, "--model-path", str(folder), "--device", "cpu", flag])
    [line] = lines
    assert code == 2 and "can't be combined with 2c4: indexers that score less than everything were never tried" in line


def without_placing(folder: Path) -> tuple[int, list[str]]:
    """Load a model where nothing makes its indexers choose among candidates."""
    placing.install = lambda *_: None  # type: ignore[assignment]
    return _ended(lambda: load_runner(folder))


def without_giving(folder: Path) -> tuple[int, list[str]]:
    """Load a model whose F layers keep nothing."""

    class Giving(candidates.Giving):
        def __init__(self, indexer: Any, method: str, layer: int, counts: Any) -> None:
            super().__init__(indexer, method, layer, ())

    placing.Giving = Giving  # type: ignore[misc]
    return _ended(lambda: load_runner(folder))


@pytest.mark.parametrize(
    ("load", "line"),
    [
        (without_placing, "letter 2 would run as F, the pattern says C"),
        (without_giving, "letter 2 chooses from what letter 0 scored highest, which gives nothing"),
    ],
)
def test_what_was_not_made_to_choose_is_not_served(load: Any, line: str, tmp_path: Path) -> None:
    folder = models.build("glm-dense", tmp_path / "glm")
    file = write_pattern(Pattern.parse("FSCFFF+2c4"), folder, tmp_path / "pattern.yaml")
    code, lines = call(load, folder, SGLANG_INDEXCACHE_PATTERN=file)
    assert code == 2 and lines == [f"indexcache: {line}"]
