"""The plugin's features on published SGLang versions: unpack their wheels, install nothing, print a table.

python -m scripts.tools.probe_wheels 0.5.17 0.5.23 --folder build/wheels
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from indexcache_launch.environment import Environment
from sglang_indexcache.sglang.probes import SglangSource

VERSIONS = ("0.5.11", "0.5.13.post1", "0.5.15.post1", "0.5.17", "0.5.20", "0.5.23")


def unpacked(version: str, folder: Path) -> SglangSource:
    """Return the wheel of `version` below `folder`, downloaded if it is not there."""
    target = folder / version
    if not (target / "sglang").is_dir():
        target.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(target), f"sglang=={version}"]
        subprocess.run(download, check=True)
        for wheel in target.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
            wheel.unlink()
    return SglangSource.at(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=Path("build/wheels"))
    options = parser.parse_args()
    environments = [Environment.of(unpacked(version, options.folder)) for version in options.versions]
    print("| feature | " + " | ".join(environment.sglang for environment in environments) + " |")
    print("|---|" + "---|" * len(environments))
    for rows in zip(*(environment.features for environment in environments), strict=True):
        cells = ["yes" if row.refused is None else "no" for row in rows]
        print(f"| {rows[0].name}: {rows[0].does} | " + " | ".join(cells) + " |")
    print()
    for environment in environments:
        for row in environment.features:
            if row.refused is not None:
                print(f"- {row.name}: {row.refused} (then: {row.otherwise})")


if __name__ == "__main__":
    main()
