"""Pattern files on the hub: pinned to a commit, one line where they can't be had, and local files first."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from indexcache_published.hub import HubFile
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import IndexCacheError, Pattern, PatternFile, launch_server
from sglang_indexcache.check import main
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.io.errors import PatternFileError
from sglang_indexcache.io.refusal import ALLOW_MISMATCH_VARIABLE, PATTERN_VARIABLE
from sglang_indexcache.io.strict_yaml import MAX_BYTES
from sglang_indexcache.pattern_file.file import split_retention
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.request import carried, wanted
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.requested import Request
from tests.conftest import tiny_config
from tests.fake_hub import COMMIT, OTHER_COMMIT, FakeHub, serving, use

NAME = "org/name/pattern.yaml"
PINNED = f"org/name@{COMMIT}/pattern.yaml"


def content(*letters: str) -> bytes:
    file = pattern_file(Pattern(letters[0]), tiny_config())
    return file.model_copy(update={"patterns": {"1/2": letters[0], "1/3": letters[-1]}}).dumps().encode()


HALF_AND_THIRD = content("FSFSFS", "FSSFSS")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with serving(FakeHub()) as running:
        running.put("org/name", "pattern.yaml", HALF_AND_THIRD)
        use(running.address, tmp_path / "cache", monkeypatch)
        yield running


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NAME, HubFile("org/name", "pattern.yaml")),
        ("org/name/glm/5.yml", HubFile("org/name", "glm/5.yml")),
        ("org/name@v1.0/pattern.yaml", HubFile("org/name", "pattern.yaml", "v1.0")),
        (PINNED, HubFile("org/name", "pattern.yaml", COMMIT)),
        ("org/name@refs/pr/3/pattern.yaml", HubFile("org/name", "pattern.yaml", "refs/pr/3")),
        ("org/name@my%2Fbranch/pattern.yaml", HubFile("org/name", "pattern.yaml", "my/branch")),
        *(
            (text, None)
            for text in (
                "pattern.yaml",
                "name/pattern.yaml",
                "org/name/pattern.json",
                "/org/name/pattern.yaml",
                "./org/name/pattern.yaml",
                "../org/name/pattern.yaml",
                "org/name/../pattern.yaml",
                "org/name//pattern.yaml",
                "org/name@/pattern.yaml",
                "org/name@..%2F../pattern.yaml",
                "org/name@a b/pattern.yaml",
                "org/name@1/4",
            )
        ),
    ],
)
def test_names_are_those_of_hf_file_system(text: str, expected: HubFile | None) -> None:
    found = HubFile.parse(text)
    assert found == expected and (found is None or str(found) == text)


def test_a_retention_stands_behind_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (NAME, PINNED, "org/name@refs/pr/3/pattern.yaml"):
        assert split_retention(name) == (Path(name), None)
        assert split_retention(f"{name}@1/4") == (Path(name), "1/4")


def test_what_may_be_local_is_local(hub: FakeHub) -> None:
    """A file, and a name that begins with a folder of this machine: a typing error is no question to the hub."""
    Path("org").mkdir()
    for name in (NAME, "org/name@main/pattern.yaml"):
        assert HubFile.parse(name) is None
        with pytest.raises(PatternFileError, match="No such file"):
            PatternSpec.read(name)
    Path("org/name").mkdir()
    Path(NAME).write_bytes(HALF_AND_THIRD)
    assert PatternSpec.read(NAME).text == NAME and not hub.requests


def test_an_address_is_answered_with_the_name() -> None:
    with pytest.raises(PatternFileError, match=r"pattern is an address \(hf://\); expected org/name/pattern.yaml"):
        PatternSpec.read("hf://org/name/pattern.yaml")


def test_a_branch_is_pinned_to_its_commit(hub: FakeHub) -> None:
    spec = PatternSpec.read(f"{NAME}@1/3")
    assert spec.text == f"{PINNED}@1/3" and str(spec.known()) == "FSSFSS" and spec.label == "pattern"
    assert PatternFile.load(f"{NAME}@1/2").as_pattern() == Pattern("FSFSFS")
    hub.put("org/name", "pattern.yaml", content("FFFSSS", "FFSSSS"), OTHER_COMMIT)
    hub.put("org/name", "pattern.yaml", HALF_AND_THIRD, COMMIT, branch="v1")
    assert PatternSpec.read(f"{NAME}@1/3").text == f"org/name@{OTHER_COMMIT}/pattern.yaml@1/3"
    assert PatternSpec.read("org/name@v1/pattern.yaml").text == PINNED
    hub.requests.clear()
    assert str(PatternSpec.read(f"{PINNED}@1/3").known()) == "FSSFSS" and not hub.requests


def test_offline_the_cache_answers(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PatternSpec.read(NAME)
    hub.requests.clear()
    use(hub.address, tmp_path / "cache", monkeypatch, offline=True)
    assert PatternSpec.read(f"{NAME}@1/3").text == f"{PINNED}@1/3" and not hub.requests
    for name in ("org/name/other.yaml", "org/other/pattern.yaml", f"org/name@{OTHER_COMMIT}/pattern.yaml"):
        with pytest.raises(PatternFileError, match="not in the cache, and the hub was not reached"):
            PatternSpec.read(name)
    with pytest.raises(IndexCacheError, match=r"org/other: no such folder.* the hub was not reached"):
        Checkpoint.read("org/other")


def test_a_hub_that_does_not_answer_is_no_reason_to_take_what_is_in_the_cache(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whether the branch is still there; a commit is what it is."""
    PatternSpec.read(NAME)
    use("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)
    with pytest.raises(PatternFileError, match=rf"^{NAME}: no such file here, and it can't be had from the hub: Conn"):
        PatternSpec.read(NAME)
    assert PatternSpec.read(PINNED).text == PINNED


def test_a_branch_that_moves_meanwhile_is_asked_for_again(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size was that of another commit, so nobody knows what was read."""
    resolve = hub.answer

    def moving(path: str) -> tuple[int, dict[str, str], bytes]:
        found = resolve(path)
        hub.put("org/name", "pattern.yaml", HALF_AND_THIRD, OTHER_COMMIT)
        return found

    monkeypatch.setattr(hub, "answer", moving)
    with pytest.raises(PatternFileError, match=f"it was at commit {COMMIT}, then at {OTHER_COMMIT}; expected one that"):
        PatternSpec.read(NAME)


def answer(**changes: object) -> Callable[[FakeHub], None]:
    return lambda hub: vars(hub).update(changes)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("org/name/other.yaml", answer(), "no such file there"),
        ("org/name@v2/pattern.yaml", answer(), "no such revision there"),
        ("org/other/pattern.yaml", answer(), "no such repository, or a private one without a token"),
        (NAME, answer(status=403, headers={"X-Error-Code": "GatedRepo"}), "gated; expected a token that has access"),
        (NAME, answer(status=500), "HfHubHTTPError: Server error '500"),
        (NAME, answer(headers={"X-Repo-Commit": None}), "the answer does not name the commit"),
        (NAME, answer(headers={"X-Repo-Commit": "../../../.."}), "the answer does not name the commit"),
        (NAME, answer(headers={"Content-Length": None}), "it has no size, expected at most"),
        (NAME, answer(headers={"Content-Length": str(MAX_BYTES + 1)}), f"it has {MAX_BYTES + 1} bytes, expected at"),
        (NAME, answer(headers={"X-Linked-Size": "7"}), "Consistency check failed"),
    ],
)
def test_what_can_not_be_had_is_one_line(
    hub: FakeHub, name: str, change: Callable[[FakeHub], None], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(hub)
    assert main([name, "--server", "http://127.0.0.1:9"]) == 2
    [line] = [text for text in capsys.readouterr().err.splitlines() if text.startswith("indexcache-check: ")]
    assert line.startswith(f"indexcache-check: {name}: no such file here, and it can't be had from the hub: ")
    assert reason in line and len(line) < 400


def test_what_is_no_pattern_file_is_refused_with_its_name(hub: FakeHub) -> None:
    hub.put("org/name", "pattern.yaml", b"a: [")
    with pytest.raises(PatternFileError, match=rf"^org/name@{COMMIT}/pattern.yaml: line 1: not YAML"):
        PatternSpec.read(NAME)


def test_without_the_client_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(PatternFileError, match="huggingface_hub is not installed; expected: pip install hugg"):
        PatternSpec.read(NAME)


def test_check_says_which_commit_it_read(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "glm").mkdir()
    (tmp_path / "glm" / "config.json").write_text(json.dumps(tiny_config()))
    assert main([f"{NAME}@1/3", "--model", str(tmp_path / "glm"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["source"], report["pattern"]) == (f"{PINNED}@1/3", "FSSFSS")


def test_an_engine_carries_the_commit(hub: FakeHub) -> None:
    """The main process reads the file once; schedulers get letters, and the name with the commit for their status."""
    request = Request(asked=Asked(pattern=f"{NAME}@1/3"))
    read = wanted(request)
    assert read is not None and read.text == f"{PINNED}@1/3"
    hub.requests.clear()
    hub.put("org/name", "pattern.yaml", content("FFFSSS", "FFSSSS"), OTHER_COMMIT)
    found = wanted(replace(request, carried=carried(read)))
    assert found is not None and found.text == f"{PINNED}@1/3" and str(found.known()) == "FSSFSS" and not hub.requests


def test_the_launcher_hands_on_the_commit(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch_server, "check_plugin_is_found", lambda: None)
    for variable in (PATTERN_VARIABLE, ALLOW_MISMATCH_VARIABLE):
        monkeypatch.setenv(variable, "")  # and what the launcher sets is gone after the test
    launch_server.prepare(["--indexcache-pattern", f"{NAME}@1/3", "--model-path", "glm"])
    assert os.environ[PATTERN_VARIABLE] == f"{PINNED}@1/3"
    assert f"note from indexcache: the pattern is {PINNED}@1/3\n" in capsys.readouterr().err
    hub.files.clear()
    with pytest.raises(IndexCacheError, match="it can't be had from the hub"):
        launch_server.prepare(["--indexcache-pattern", "org/name@v9/pattern.yaml", "--model-path", "glm"])
