"""Rows of a source: local files are read here, hub ids by `datasets`. All is streamed; a path is never a glob."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from indexcache_search import demo
from indexcache_search.errors import DataError
from sglang_indexcache.errors import one_line
from sglang_indexcache.files import reason

SHUFFLE_BUFFER = 10_000  # documents held while streaming
KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text", ".rst": "text"}

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")

Row = Mapping[str, Any]


def rows(source: str, seed: int) -> Iterator[Row]:
    """The rows of `source`, shuffled by `seed`.

    Raises:
        DataError: if it can't be found or read.
    """
    if (url := _URL.match(source)) is not None:  # it may hold a password
        raise DataError(f"{url.group()}...: found a URL, expected a file, folder or hub id; download it first")
    from datasets import IterableDataset, load_dataset  # takes seconds to import

    try:
        files = _files(source)
        if files is None:
            name, _, subset = source.partition(":")
            whole = load_dataset(name, *([subset] if subset else []), split="train", streaming=True)
        else:
            whole = IterableDataset.from_generator(partial(_read_all), gen_kwargs={"files": files})
        yield from whole.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    except DataError:
        raise
    except Exception as error:  # datasets, pyarrow and the hub client each have their own
        raise DataError(f"{source}: can't be read: {one_line(error, 200) or type(error).__name__}") from None


def _files(source: str) -> list[str] | None:
    """The files of a source; `None` for a hub id."""
    if source.startswith("demo:"):
        return [str(demo.data_file(source.removeprefix("demo:")))]
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in KINDS and file.is_file())
        if not files:
            raise DataError(f"{source}: no {', '.join(KINDS)} file in this folder")
        endings = {file.suffix for file in files}
        if len({KINDS[ending] for ending in endings}) > 1:
            raise DataError(f"{source}: holds {', '.join(sorted(endings))} files, expected one kind")
        return [str(file) for file in files]
    if path.exists():
        if not path.is_file():
            raise DataError(f"{source}: not a regular file")
        if path.suffix not in KINDS:
            raise DataError(f"{source}: ending is {path.suffix or 'missing'}, expected {', '.join(KINDS)}")
        return [source]
    if path.suffix in KINDS or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise DataError(f"{source}: no such file, and not a hub id like owner/name")
    return None


def _read_all(files: list[str]) -> Iterator[Row]:
    for name in files:
        path = Path(name)
        read = {"json": _json_rows, "parquet": _parquet_rows, "text": _text_rows}[KINDS[path.suffix]]
        try:
            yield from read(path)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: {reason(error)}") from None


def _json_rows(path: Path) -> Iterator[Row]:
    """JSON lines, or one list of rows."""
    with path.open(encoding="utf-8") as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        file.seek(0)
        if start == "[":
            try:
                content = json.load(file)
            except (ValueError, RecursionError):
                raise DataError(f"{path}: not JSON") from None
            yield from (_row(path, f"row {number}", row) for number, row in enumerate(content, 1))
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _row(path, f"line {number}", json.loads(line))
                except (ValueError, RecursionError) as error:
                    if isinstance(error, DataError):
                        raise
                    raise DataError(f"{path}: line {number}: not JSON") from None


def _row(path: Path, place: str, content: Any) -> Row:
    if not isinstance(content, dict):
        raise DataError(f"{path}: {place}: found {type(content).__name__}, expected an object with text or input_ids")
    return content


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


def _text_rows(path: Path) -> Iterator[Row]:
    yield {"text": path.read_text(encoding="utf-8")}
