"""The output folder of a search as one publishes it: a model card, and files that belong together or are refused."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from indexcache_published.folder import SearchFolder
from indexcache_search.cli.command import application, command_line
from indexcache_search.cli.search import app
from indexcache_search.workdir.mark import Mark
from sglang_indexcache import PatternFile
from sglang_indexcache.check import main
from sglang_indexcache.pattern_file.result_folder import CARD, FILES, MARK, METRICS, PATTERN
from tests.fake_hub import COMMIT, FakeHub, serving, use
from tests.search.test_fuzz import mutated, one_line_or
from tests.search.test_search import arguments

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def searched(model_folder: Path, token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search."""
    folder = tmp_path_factory.mktemp("searched") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: file.write("<svg></svg>"))
        result = CliRunner().invoke(app, arguments(model_folder, token_file, folder))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def folder(searched: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(searched, tmp_path / "deploy")


def problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    code = main([str(folder)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert code == (1 if lines else 0)
    return [line.removeprefix("problem: ") for line in lines]


# -- the card


def front_matter(card: str) -> Any:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_search_leaves_a_model_card(searched: Path, model_folder: Path) -> None:
    card, file = (searched / CARD).read_text(), PatternFile.load(searched / PATTERN)
    metrics = json.loads((searched / METRICS).read_text())
    assert file.calibration is not None and file.search is not None
    assert front_matter(card) == {
        "tags": ["indexcache", "sparse-attention", "sglang"]
    }  # a folder is no model of the hub
    for text in (
        f"# Index sharing for {model_folder.name}\n",
        f"| 1/2 | 3 of 6 F | `{file.pattern}` |",
        "`@1/2` or `@1/3` takes a pattern of its own",
        f" --model {model_folder} --calibration",
        f"| strategy | greedy, seed 0, {file.search.evaluations} patterns evaluated |",
        f"| engine | {file.versions['engine']} |",
        f"| torch | {file.versions['torch']} |",
        f"| sglang_indexcache | {file.versions['sglang_indexcache']} |",
        *(file.model.config_sha256 or "", file.calibration.sha256),
        *(metrics["held_out"]["sha256"], metrics["weights_sha256"]),
    ):
        assert text in card, text
    assert len(metrics["weights_sha256"]) == 64
    assert metrics["command"] in card


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--model", "a b", "--tp", "8"], "--model 'a b' --tp 8"),
        (["--hf-token", "xyz", "--api-key=k", "--token=t"], "--hf-token '***' '--api-key=***' '--token=***'"),
        (["--endpoint", "http://me:pw@host:1/?key=k"], "--endpoint http://host:1/"),
        (["--max-total-tokens", "9", "--tokenizer-path", "x"], "--max-total-tokens 9 --tokenizer-path x"),
    ],
)
def test_the_command_line_has_no_secrets(words: list[str], shown: str) -> None:
    found = []

    def command(context: Any) -> None:
        found.append(command_line(context))

    command.__annotations__["context"] = __import__("typer").Context
    more: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
    result = CliRunner().invoke(application({"indexcache-search": command}, **more), words)
    assert result.exit_code == 0 and found[0].partition(" ")[2] == shown


def test_a_readme_that_is_somebodys_stays(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("# My deployment\n")
    result = CliRunner().invoke(app, arguments(model_folder, token_file, tmp_path))
    assert result.exit_code == 2 and f"{CARD}: is there already, and no {MARK} says" in result.stderr
    assert (tmp_path / CARD).read_text() == "# My deployment\n" and [*tmp_path.iterdir()] == [tmp_path / CARD]


# -- the folder


def test_a_folder_that_belongs_together(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == (
        f"folder    {folder}\nits 4 files belong together, as indexcache-search wrote them (which does not say who ran"
        " it)\n"
    )
    (folder / "LICENSE").write_text("mine")
    assert main([str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(folder), "problems": []}


def test_a_folder_stands_for_its_pattern(folder: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--model", str(model_folder)]) == 0
    output = capsys.readouterr().out
    assert "its 4 files belong together" in output and f"source    {folder}/pattern.yaml\n" in output
    (folder / PATTERN).write_text((folder / PATTERN).read_text().replace("seed: 0", "seed: 1"))
    assert main([str(folder), "--model", str(model_folder)]) == 1
    assert "source" not in capsys.readouterr().out  # what was changed is not read on


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_changed_is_named(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (folder / name).read_text()
    (folder / name).write_text(content.replace("4", "5", 1))
    [line] = problems(folder, capsys)
    assert re.fullmatch(rf"{folder / name}: was changed since .* wrote it: sha256 [0-9a-f]{{16}}..., not .*", line)
    (folder / name).unlink()
    assert f"{folder / name}: No such file or directory" in problems(folder, capsys)
    (folder / name).mkdir()
    assert any(line.startswith(f"{folder / name}: ") for line in problems(folder, capsys))


def reseal(folder: Path, name: str) -> None:
    """Write the digest of a file into the mark, as somebody would who changes both."""
    mark = json.loads((folder / MARK).read_text())
    mark["files"][name] = [hashlib.sha256((folder / name).read_bytes()).hexdigest()]
    (folder / MARK).write_text(json.dumps(mark))


def test_metrics_of_another_pattern_file_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even where the mark was written anew: metrics.json has the pattern file that it is of."""
    text = (folder / PATTERN).read_text()
    (folder / PATTERN).write_text(text.replace("seed: 0", "seed: 1"))
    reseal(folder, PATTERN)
    [line] = problems(folder, capsys)
    assert line == f"{folder / METRICS}: has another pattern file than {PATTERN}; expected files of one search"
    (folder / METRICS).write_text('{"pattern_file": 7}')
    reseal(folder, METRICS)
    assert problems(folder, capsys) == [
        f"{folder / METRICS}: pattern_file is no pattern file, expected that of {PATTERN}"
    ]


@pytest.mark.parametrize("name", ["config.json", "the model's files", "the calibration tokens", "the held-out tokens"])
def test_a_card_of_another_search_is_refused(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, metrics = PatternFile.load(folder / PATTERN), json.loads((folder / METRICS).read_text())
    assert file.calibration is not None and file.model.config_sha256 is not None
    sha256 = {
        "config.json": file.model.config_sha256,
        "the model's files": metrics["weights_sha256"],
        "the calibration tokens": file.calibration.sha256,
        "the held-out tokens": metrics["held_out"]["sha256"],
    }[name]
    card = (folder / CARD).read_text()
    assert card.count(sha256) == 1
    (folder / CARD).write_text(card.replace(sha256, "0" * 64))
    reseal(folder, CARD)
    assert problems(folder, capsys) == [
        f"{folder / CARD}: lacks the sha256 of {name}, {sha256[:16]}...; expected files of one search"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mark: mark.update(command="indexcache-eval"), "is the mark of indexcache-eval, expected that of"),
        (lambda mark: mark.update(schema="indexcache-run/v2"), "schema: Input should be 'indexcache-run/v1'"),
        (lambda mark: mark.pop("files"), "files: Field required"),
        (lambda mark: mark["files"].pop(PATTERN), f"{PATTERN}: {MARK} does not list it, expected its one sha256"),
        (lambda mark: mark["files"].update({PATTERN: []}), f"{PATTERN}: {MARK} does not list it"),
        (lambda mark: mark["files"][PATTERN].append("0" * 64), f"{PATTERN}: {MARK} does not list it"),
        (lambda mark: mark["files"].update({PATTERN: None}), f"{PATTERN}: {MARK} does not list it"),
        (lambda mark: mark["files"].update({PATTERN: ["0" * 64]}), f"{PATTERN}: was changed since"),
        (lambda mark: mark["files"].update({PATTERN: ["0" * 63]}), f"files.{PATTERN}.0: String should match"),
    ],
)
def test_a_changed_mark_is_refused(
    change: Callable[[Any], None], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = json.loads((folder / MARK).read_text())
    change(mark)
    (folder / MARK).write_text(json.dumps(mark))
    [line] = problems(folder, capsys)
    assert message in line


def test_a_folder_without_a_mark_is_none_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{tmp_path}: has no {MARK}; expected the output folder of indexcache-search, or a pattern file"
    assert problems(tmp_path, capsys) == [line]


def test_a_repository_of_the_hub_is_checked_like_a_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with serving(FakeHub()) as hub:
        use(hub.address, tmp_path / "cache", monkeypatch)
        for name in (MARK, *FILES):
            hub.put("org/name", name, (folder / name).read_bytes())
        assert main(["org/name"]) == 0
        assert capsys.readouterr().out.startswith(f"folder    org/name@{COMMIT}\nits 4 files belong together")
        hub.put("org/other", MARK, (folder / MARK).read_bytes())
        assert main(["org/other"]) == 2
        assert f"org/other@{COMMIT}/{PATTERN}: no such file here, and it can't be" in capsys.readouterr().err
        mark = json.loads((folder / MARK).read_text())  # of a search without an extension that writes pages
        mark["files"] = {name: mark["files"][name] for name in (PATTERN, METRICS)}
        hub.put("org/pageless", MARK, json.dumps(mark).encode())
        for name in (PATTERN, METRICS):
            hub.put("org/pageless", name, (folder / name).read_bytes())
        assert main(["org/pageless"]) == 0
        assert capsys.readouterr().out.startswith(f"folder    org/pageless@{COMMIT}\nits 2 files belong together")


# -- a thousand of each


def test_a_thousand_changed_folders(folder: Path) -> None:
    """A folder with a changed file is refused in lines of their own; a mark that says the same is none."""
    rng, original = random.Random(11), {name: (folder / name).read_text() for name in (MARK, *FILES)}
    said, refused = Mark.read(folder), 0
    assert said is not None
    for number in range(1_000):
        name = (MARK, *FILES)[number % 5]
        text = mutated(original[name], rng)
        (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        found = one_line_or(lambda: SearchFolder(folder, "deploy").problems())
        assert all(line and line.isprintable() and len(line) < 1100 for line in found), found
        if text != original[name] and not (name == MARK and same_digests(text, said)):
            assert found, (name, text)
            refused += 1
        elif text == original[name]:
            assert not found
        (folder / name).write_text(original[name])
    assert refused > 850


def same_digests(text: str, said: Mark) -> bool:
    """Whether a changed mark is still one of a search that lists the same digests: its date, say, was changed."""
    try:
        found = json.loads(text)
        command, listed = found["command"], {name: found["files"][name] for name in FILES}
    except (ValueError, KeyError, TypeError):
        return False
    return command == "indexcache-search" and listed == {name: said.files[name] for name in FILES}


@pytest.mark.parametrize("answers", [300, pytest.param(1_000, marks=pytest.mark.slow)])
def test_hundreds_of_answers_of_a_hub(
    answers: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed headers and files: the pattern file that was put there, or one line."""
    monkeypatch.chdir(tmp_path)
    rng, text = random.Random(12), (folder / PATTERN).read_text()
    whole, accepted = PatternFile.loads(text), 0
    odd = [
        "",
        "0",
        "-1",
        "x",
        "1" * 400,
        "é".encode("latin-1").decode("latin-1"),
        "../../x",
        COMMIT,
        COMMIT[:-1],
        '"',
        "W/",
    ]
    names = [
        "X-Repo-Commit",
        "ETag",
        "X-Linked-Etag",
        "X-Linked-Size",
        "Content-Length",
        "Content-Encoding",
        "Location",
    ]
    with serving(FakeHub()) as hub:
        for number in range(answers):
            use(hub.address, tmp_path / f"cache-{number % 7}-{number}", monkeypatch)
            content = text if rng.random() < 0.5 else mutated(text, rng)
            hub.put("org/name", PATTERN, content.encode("utf-8", "surrogatepass"))
            hub.headers = {rng.choice(names): rng.choice([None, *odd]) for _ in range(rng.randint(0, 2))}
            hub.status = rng.choice([200, 200, 200, 200, 206, 302, 400, 401, 403, 404, 416, 500])
            found = one_line_or(lambda: PatternFile.load(f"org/name/{PATTERN}"))
            if found is not None:
                accepted += 1
                assert found == (whole if content == text else PatternFile.loads(content.encode()))
            shutil.rmtree(tmp_path / f"cache-{number % 7}-{number}", ignore_errors=True)
    assert answers // 50 < accepted < 0.9 * answers
