"""What a tree says its version is: between releases it must not say that it is one."""

from __future__ import annotations

import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

import sglang_indexcache
from sglang_indexcache import version as module
from sglang_indexcache.version import RELEASE, of_tree, requirement, version


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    for content in ("one", "two"):
        (tmp_path / "file").write_text(content)
        git(tmp_path, "add", "file")
        git(tmp_path, "commit", "-q", "-m", content)
    return tmp_path


def test_between_releases_it_says_how_many_commits_and_the_last(tree: Path) -> None:
    commit = git(tree, "rev-parse", "--short=9", "HEAD")
    assert of_tree(tree, "1.2.0") == f"1.2.0.dev2+g{commit}"
    (tree / "file").write_text("three")
    assert of_tree(tree, "1.2.0") == f"1.2.0.dev2+g{commit}.dirty"
    git(tree, "tag", "v1.1.0")
    assert of_tree(tree, "1.2.0") == f"1.2.0.dev2+g{commit}.dirty"


def test_a_release_is_its_tag_and_nothing_behind_or_beside_it(tree: Path) -> None:
    git(tree, "tag", "-a", "v1.2.0", "-m", "1.2.0")
    assert of_tree(tree, "1.2.0") == "1.2.0"
    (tree / "file").write_text("three")
    assert of_tree(tree, "1.2.0") == "1.2.0+dirty"
    git(tree, "commit", "-q", "-a", "-m", "three")
    commit = git(tree, "rev-parse", "--short=9", "HEAD")
    assert of_tree(tree, "1.2.0") == f"1.2.0.post1+g{commit}"
    assert Version("1.2.0.dev2+gabc") < Version("1.2.0") < Version(of_tree(tree, "1.2.0"))


@pytest.mark.parametrize("without", ["commits", "a repository", "git"])
def test_what_git_does_not_say_is_no_release(tmp_path: Path, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "commits":
        git(tmp_path, "init", "-q")
    if without == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert of_tree(tmp_path, "1.2.0") == "1.2.0.dev0+unknown"


def test_a_source_distribution_and_an_installed_package_say_what_they_were_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    version.cache_clear()
    assert version() == metadata.version("sglang-indexcache")
    version.cache_clear()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "PKG-INFO").write_text(
        "Metadata-Version: 2.4\nName: sglang-indexcache\nVersion: 1.2.0.dev7+gabc\n\nText"
    )
    assert version() == "1.2.0.dev7+gabc"
    version.cache_clear()
    monkeypatch.setattr(module.metadata, "version", _missing)
    (tmp_path / "pyproject.toml").unlink()
    assert version() == f"{RELEASE}.dev0+unknown"
    version.cache_clear()


def _missing(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_what_is_missing_is_installed_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has a version yet, so `pip install 'sglang-indexcache[search]'` would find nothing."""
    root = Path(module.__file__).parents[1]
    assert requirement("search") == f"'{root}[search]'" and requirement() == str(root)
    monkeypatch.setattr(module, "_ROOT", tmp_path)  # as in site-packages
    assert requirement("search") == "'.[search]' in a checkout of sglang-indexcache"


def test_it_is_where_people_look_for_it() -> None:
    assert sglang_indexcache.__version__ == version()
    assert Version(version()).base_version == RELEASE
