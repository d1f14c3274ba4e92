"""The version: a release's is its tag, that of a tree between releases also says how many commits it has, and the last.

`pyproject.toml` takes it from here when a distribution is built, so this module imports nothing of the package.
"""

from __future__ import annotations

import shlex
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

RELEASE = "0.2.0"
"""The release that this tree is, or comes before; raised once that one is tagged."""
_ROOT = Path(__file__).parents[1]
_HASH = 9  # digits of a commit


@cache
def version() -> str:
    """Return the version of this code: `0.2.0`, or `0.2.0.dev5120+g4dd304661` between releases.

    A changed tree ends in `.dirty`. Of an installed package it is that of the tree that it was built from.
    """
    if (_ROOT / ".git").exists() and (_ROOT / "pyproject.toml").exists():
        return of_tree(_ROOT, RELEASE)
    packed = _ROOT / "PKG-INFO"  # of a source distribution
    if packed.is_file() and (_ROOT / "pyproject.toml").exists():
        lines = packed.read_text(encoding="utf-8").splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("Version: "))
    try:
        return metadata.version("sglang-indexcache")
    except metadata.PackageNotFoundError:  # copied without its metadata
        return f"{RELEASE}.dev0+unknown"


def requirement(extra: str = "") -> str:
    """Return what `pip install` takes for an extra: a path, of a checkout, since no index has a version yet."""
    wanted = f"[{extra}]" if extra else ""
    if (_ROOT / "pyproject.toml").exists():
        return shlex.quote(f"{_ROOT}{wanted}")
    return f"'.{wanted}' in a checkout of sglang-indexcache"


def of_tree(root: Path, release: str) -> str:
    """Return the version of a git checkout by its tags and commits; `RELEASE.dev0+unknown` where git does not say."""
    described = _git(
        root, "describe", "--tags", "--long", "--always", "--dirty", f"--abbrev={_HASH}", "--match", f"v{release}"
    )
    commits = _git(root, "rev-list", "--count", "HEAD")
    if described is None or commits is None:
        return f"{release}.dev0+unknown"
    words = described.removeprefix(f"v{release}-").split("-")
    dirty = ".dirty" if words[-1] == "dirty" else ""
    words = words[: -1 if dirty else None]
    if len(words) == 1:  # no such tag: the commit alone
        return f"{release}.dev{commits}+g{words[0]}{dirty}"
    since, commit = words
    if since == "0":
        return release + ("+dirty" if dirty else "")
    return f"{release}.post{since}+{commit}{dirty}"


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
