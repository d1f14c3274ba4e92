"""The walls around the extras: the core imports none, and says no word of theirs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = tuple(ROOT / name for name in ("sglang_indexcache", "search/indexcache_search", "kernels/indexcache_kernels"))
EXTRAS = sorted(path.name for path in (ROOT / "extras").iterdir() if (path / f"indexcache_{path.name}").is_dir())
ALL = "dense forecast harness lab launch minimax published report rows speed tasks train watch".split()
MAY_IMPORT = {"dense": {"report"}, "lab": {"dense", "report", "train"}, "watch": {"rows"}}
"""By extra, the others that it may import."""
WORDS = re.compile(
    "key_delta|key_plan|KeyPlan|[Ee]viction|[Oo]ffload|nosa|NOSA|MISSES|buffer_pages|[Ww]atch|WATCH|[Dd]istill"
    "|[Hh]arness|HARNESS|lm.eval"
)
ALLOWED = {
    "sglang_indexcache/families/refused.py": "docs/distill.md",  # the page that helps
    "sglang_indexcache/pattern_file.schema.json": "nosa|NOSA|buffer_pages",  # files of dense models
}
"""By file of the core, what of it is no word of an extra."""


def files(folder: Path, *suffixes: str) -> Iterator[Path]:
    """Files of text below a folder, without the demo's data."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in suffixes and "__pycache__" not in path.parts and "demo" not in path.parts[:-1]:
            yield path


def imported(path: Path) -> Iterator[str]:
    """All modules, and names in modules, that a file imports, also where it does so late, or by a string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, path
            yield from (f"{node.module}.{item.name}" for item in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"indexcache_\w+(\.\w+)*", str(node.value)):
            yield str(node.value)


def extras_of(path: Path) -> set[str]:
    """Extras that a file imports."""
    tops = {name.partition(".")[0] for name in imported(path)}
    return {extra for extra in EXTRAS if f"indexcache_{extra}" in tops}


def test_the_core_imports_no_extra() -> None:
    found = [path for folder in CORE for path in files(folder, ".py")]
    assert len(found) > 250 and EXTRAS == ALL
    assert {str(path.relative_to(ROOT)): extras for path in found if (extras := extras_of(path))} == {}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_imports_no_other(extra: str) -> None:
    """But the lab, which tries things on dense and on trained models, and what reads logs or draws pages."""
    for path in files(ROOT / "extras" / extra / f"indexcache_{extra}", ".py"):
        assert extras_of(path) <= {extra, *MAY_IMPORT.get(extra, ())}, path


def test_the_core_says_no_word_of_an_extra() -> None:
    said = {}
    for path in (path for folder in CORE for path in files(folder, ".py", ".json", ".html", ".yaml", ".md", ".css")):
        name = str(path.relative_to(ROOT))
        text = re.sub(ALLOWED.get(name, "$^"), "", path.read_text())
        if words := sorted({*WORDS.findall(text)}):
            said[name] = words
    assert said == {}
    assert all(re.search(words, (ROOT / name).read_text()) for name, words in ALLOWED.items())
