"""The wall around the lab: nothing outside imports it or knows what is in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import indexcache_kernels
import indexcache_search
import sglang_indexcache

LAB = "indexcache_lab"
ROOT = Path(__file__).parents[2]


def outside(*packages: object) -> Iterator[Path]:
    """The packages' files of text that are not the lab's."""
    for package in packages:
        folder = Path(package.__path__[0])  # type: ignore[attr-defined]
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json", ".html", ".yaml") and not {"lab", "demo"} & {
                *path.relative_to(folder).parts
            }:
                yield path


def imported(path: Path) -> Iterator[str]:
    """All modules, and names in modules, that a file imports, also where it does so late."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, path
            yield from (f"{node.module}.{item.name}" for item in node.names)


def test_nothing_outside_imports_the_lab() -> None:
    """The entry points of console scripts name a module of it, by string."""
    files = [path for path in outside(sglang_indexcache, indexcache_search, indexcache_kernels) if path.suffix == ".py"]
    assert len(files) > 200
    for path in files:
        assert not [name for name in imported(path) if f"{name}.".startswith(f"{LAB}.")], path
        assert LAB not in path.read_text() or path.name == "__main__.py", path


def test_nothing_outside_names_what_is_in_the_lab() -> None:
    """But the kernels, whose `key_delta` is an operation like the others."""
    names = re.compile("key_plan|KeyPlan|key_delta|(?<!radix[_-])(?<!lora[_-])eviction")  # two flags of SGLang's
    for path in outside(sglang_indexcache, indexcache_search):
        assert not names.search(path.read_text()), path
