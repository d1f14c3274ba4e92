"""Build, check and tag a release: `python -m scripts.tools.release 0.2.0`, then with `--tag`.

Before it: all suites pass (`.ci/run`, and the slow live tests), CHANGELOG.md has the release with its date, and
`RELEASE` in sglang_indexcache/version.py and CITATION.cff say it. After the tag: push it, and raise `RELEASE`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from datetime import date
from pathlib import Path

import yaml

from sglang_indexcache.version import RELEASE, of_tree

ROOT = Path(__file__).parents[2]
MUST_HOLD = (  # files of each package without which its commands don't run
    "sglang_indexcache/pattern_file.schema.json",
    "indexcache_search/demo/indexcache-demo/model.safetensors",
    "indexcache_kernels/py.typed",
    "indexcache_dense/py.typed",
    "indexcache_forecast/py.typed",
    "indexcache_harness/py.typed",
    "indexcache_lab/py.typed",
    "indexcache_launch/options.json",
    "indexcache_minimax/py.typed",
    "indexcache_published/files/glm-5-quarter.yaml",
    "indexcache_report/py.typed",
    "indexcache_rows/py.typed",
    "indexcache_speed/py.typed",
    "indexcache_tasks/py.typed",
    "indexcache_train/py.typed",
    "indexcache_watch/py.typed",
)


def troubles(release: str, today: str) -> list[str]:
    """Return what stands in the way of a release, a line each."""
    found = []
    if release != RELEASE:
        found.append(f"sglang_indexcache/version.py: RELEASE is {RELEASE}, expected {release}")
    notes = re.search(rf"^## \[{re.escape(release)}\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if notes is None or notes[1] != today:
        found.append(f"CHANGELOG.md: {notes[1] if notes else 'nothing'} for {release}, expected today's date, {today}")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    if citation != release:
        found.append(f"CITATION.cff: version is {citation}, expected {release}")
    if ".dirty" in of_tree(ROOT, release):
        found.append("the tree has changes that are not committed")
    if subprocess.run(["git", "tag", "--list", f"v{release}"], cwd=ROOT, capture_output=True, text=True).stdout:
        found.append(f"v{release} is tagged already")
    return found


def built(folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the source distribution of the tree."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, ROOT], check=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def check(wheel: Path, release: str) -> None:
    """Install the wheel in a new environment and run what a base install has."""
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in MUST_HOLD if name not in names]
    if missing:
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([f"{folder}/bin/pip", "install", "-q", wheel], check=True)
        subprocess.run([f"{folder}/bin/pip", "check"], check=True)
        said = subprocess.run(
            [f"{folder}/bin/indexcache-check", "--version"], capture_output=True, text=True, cwd=folder
        )
    if said.stdout.split()[-1:] != [release]:
        sys.exit(f"{wheel.name} says {said.stdout.strip() or said.stderr.strip()}, expected {release}")


def main() -> None:
    """Check the tree; with --tag also tag it, then build and check what would be uploaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="such as 0.2.0")
    parser.add_argument("--tag", action="store_true", help="make the tag; it is taken back if a check fails")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where wheel and sdist go")
    given = parser.parse_args()
    found = troubles(given.release, date.today().isoformat())
    for line in found:
        print(line, file=sys.stderr)
    if found:
        sys.exit(1)
    if not given.tag:
        print(f"ready for {given.release}; --tag builds, checks and tags it")
        return
    tag = f"v{given.release}"
    subprocess.run(["git", "tag", "-a", tag, "-m", given.release], cwd=ROOT, check=True)
    try:
        wheel, source = built(given.output)
        check(wheel, given.release)
    except BaseException:
        subprocess.run(["git", "tag", "-d", tag], cwd=ROOT)
        raise
    print(f"{tag}: {wheel} and {source}; push the tag, upload both, and raise RELEASE")


if __name__ == "__main__":
    main()
