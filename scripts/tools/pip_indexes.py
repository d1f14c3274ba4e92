"""Print what pip was told of indexes as options of uv, a line each: `python scripts/tools/pip_indexes.py`.

uv reads neither pip's files nor its variables. Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import ast
import subprocess
import sys

OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
SECTIONS = ("global.", "install.", ":env:.")  # a later one counts before an earlier one


def options(listed: str) -> list[str]:
    """Turn the lines of `pip config list` (`global.index-url='https://...'`) into options of uv."""
    told: dict[str, str] = {}
    lines = listed.splitlines()
    for section in SECTIONS:
        for key, _, value in (line.removeprefix(section).partition("=") for line in lines if line.startswith(section)):
            told[key] = str(ast.literal_eval(value))
    found = [f"{option}={item}" for name, option in OPTIONS.items() for item in told.get(name, "").split()]
    if told.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        found.append("--no-index")
    if "extra-index-url" in told:  # pip takes the best of all indexes, uv the first that has the name
        found.append("--index-strategy=unsafe-best-match")
    return found


if __name__ == "__main__":
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    print(*options(listed.stdout), sep="\n")
