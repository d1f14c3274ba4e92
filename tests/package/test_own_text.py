"""What is in the repository is the project's own, or in the public domain."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from indexcache_search import demo
from indexcache_search.data.sketch import Sketch

ROOT = Path(__file__).parents[2]
SHIPPED_ONCE = (Path(__file__).parents[1] / "shipped_once.txt").read_text().replace("\n", "")
TEXT = {".cpp", ".html", ".json", ".jsonl", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}


def texts(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The tokens of a file, of each row where it holds rows."""
    if path.suffix != ".jsonl":
        yield tokenizer.encode(path.read_text(encoding="utf-8", errors="ignore")).ids
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["input_ids"] if "input_ids" in row else tokenizer.encode(row["text"]).ids


def common(sketch: Sketch, tokens: Any) -> int:
    """How many windows of a text are in a sketch."""
    return len(sketch._sampled(tokens) & sketch._hashes)


@pytest.fixture(scope="module")
def removed() -> Sketch:
    """4,096 of the 689,158 windows of 16 tokens of the documents of other projects that the demo's data once held."""
    hashes = base64.b64decode(SHIPPED_ONCE)
    assert len(hashes) == 4096 * 5
    return Sketch.decode(SHIPPED_ONCE)


def test_no_file_holds_text_of_another_project(removed: Sketch) -> None:
    """Two windows are by chance, as code begins with the same imports everywhere; what went had 30 to 390 a file."""
    tokenizer = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = [ROOT / name for name in names if Path(name).suffix in TEXT and (ROOT / name).is_file()]
    assert len(files) > 300
    found = {
        str(path.relative_to(ROOT)): sum(common(removed, np.asarray(tokens)) for tokens in texts(path, tokenizer))
        for path in files
    }
    assert not {name: count for name, count in found.items() if count > 2}


def test_a_text_is_found_by_its_windows() -> None:
    tokens = np.random.default_rng(0).integers(0, 2048, 4000)
    sketch = Sketch.decode(Sketch.of([tokens], count=100).encode())
    assert common(sketch, tokens) == 100 and 20 < common(sketch, tokens[1000:3000]) < 80
    assert common(sketch, tokens[::-1]) == 0


def test_the_notice_says_what_is_whose() -> None:
    notice = (ROOT / "NOTICE").read_text()
    for word in ("King James", "Shakespeare", "public domain", "Django", "SQLAlchemy", "Scrapy", "Twisted", "SymPy"):
        assert word in notice
