"""List the functions that this plugin replaces in published SGLang versions, and say of each whether it was read.

python -m scripts.tools.read_sources 0.5.22 0.5.23 --folder build/wheels
"""

from __future__ import annotations

import argparse
from pathlib import Path

from indexcache_launch.environment import all_features
from scripts.tools.probe_wheels import unpacked
from sglang_indexcache.sglang.read_sources import READ, digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--folder", type=Path, default=Path("build/wheels"))
    options = parser.parse_args()
    sources = [unpacked(version, options.folder) for version in options.versions]
    for need in dict.fromkeys(need for feature in all_features() for need in feature.reads):
        print(need.target)
        for source in sources:
            text = source.definition(need)
            found = digest(text or "")
            read = "read" if found in READ.get(need.target, {}) else "NOT READ"
            print(f"    {source.version:<12} {found} {read}" + (", and not there" if text is None else ""))


if __name__ == "__main__":
    main()
