"""Data where nothing but text and token ids can be read: other rows and logs are refused in a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexcache_search.data import formats, shapes
from indexcache_search.data.reader import TokenReader
from indexcache_search.errors import DataError


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert len(shapes.shapes()) > 10
    shapes.shapes.cache_clear()
    monkeypatch.setattr(shapes, "extensions", lambda group, kind: {})
    monkeypatch.setattr(formats, "first_made", lambda group, kind: None)
    yield
    shapes.shapes.cache_clear()


def read(path: Path) -> list[list[int]]:
    return [section.tokens.tolist() for [section] in TokenReader(lambda: None, 100, 8).documents(str(path), 0)]


def test_text_and_token_ids_alone_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2], "output_ids": [3]}))
    assert read(path) == [[1, 2, 3]]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "How?"}]}))
    with pytest.raises(DataError, match=r"line 1: columns are messages, expected one of: input_ids; text;"):
        read(path)


def test_a_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("[2026-11-29 04:00:00] INFO\n")
    with pytest.raises(DataError, match=r"server\.log: is a log of requests, which needs an extension that is not"):
        read(path)
