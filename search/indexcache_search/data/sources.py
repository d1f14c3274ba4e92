"""Records of a source, streamed: local files read here, hub ids through `datasets`. Paths are never globs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from indexcache_search import demo
from indexcache_search.data.folders import data_files
from indexcache_search.data.formats import ENDINGS, LOG_FLAGS, Record, kind_of, records, table_row
from indexcache_search.errors import DataError, NoRequestsError
from sglang_indexcache import IndexCacheError
from sglang_indexcache.io.errors import one_line

SHUFFLE_BUFFER = 10_000  # documents held while streaming

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")


def rows(source: str, seed: int, notice: Callable[[str], None] = lambda _: None) -> Iterator[tuple[str, Record]]:
    """Yield the records of `source` with their locations, shuffled by `seed`.

    Args:
        source: file, folder, `demo:NAME`, or hub id: `owner/name`, `owner/name:subset`, `owner/name:subset:split`.
        seed: seed of the order.
        notice: called with a line about each part that is not read.

    Raises:
        DataError: if the source can't be found or read.
    """
    if (url := _URL.match(source)) is not None:  # it may hold a password
        raise DataError(f"{url.group()}...: found a URL, expected a file, folder or hub id; download it first")
    from datasets import load_dataset  # takes seconds to import
    from datasets.io.generator import GeneratorDatasetInputStream

    where = "can't be read"
    try:
        files = _files(source, notice)
        if files is None:
            where = "no such file or folder here, and can't be read from the hub"
            name, subset, split = (*source.split(":"), "", "")[:3]
            whole = load_dataset(name, *([subset] if subset else []), split=split or "train", streaming=True)
            shuffled = whole.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
            for number, row in enumerate(shuffled, 1):
                yield f"{source}: row {number} of those read", table_row(row)
            return
        with TemporaryDirectory(prefix="indexcache-") as cache:  # the default is in a home folder that may be read-only
            stream = GeneratorDatasetInputStream(
                partial(_read_all), cache_dir=cache, streaming=True, gen_kwargs={"files": list(map(str, files))}
            )
            empty, found = None, False
            for row in stream.read().shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
                if isinstance(row["record"], NoRequestsError):
                    empty = row["record"]
                    notice(f"{row['place']} is not read: it has no finished request")
                    continue
                found = True
                yield row["place"], row["record"]
            if empty is not None and not found:
                raise empty
    except IndexCacheError:
        raise
    except Exception as error:  # datasets, pyarrow and the hub client each have their own
        split = "; owner/name:subset:split names another split" if "split" in str(error).lower() else ""
        raise DataError(f"{source}: {where}: {one_line(error, 200) or type(error).__name__}{split}") from None


def _files(source: str, notice: Callable[[str], None]) -> list[Path] | None:
    """Return the files of a source; `None` for a hub id."""
    if source.startswith("demo:"):
        return [demo.data_file(source.removeprefix("demo:"))]
    path = Path(source)
    if path.is_dir():
        return data_files(path, notice)
    if path.exists():
        if not path.is_file():
            raise DataError(f"{source}: not a regular file")
        if path.suffix.lower() in (".pkl", ".pickle"):  # what SGLang dumps, too
            raise DataError(
                f"{source}: is a pickle, which may run code; expected SGLang's log with {LOG_FLAGS}, or {ENDINGS}"
            )
        if kind_of(path) is None:
            raise DataError(f"{source}: ending is {path.suffix or 'missing'}, expected {ENDINGS}")
        return [path]
    if kind_of(path) is not None or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise DataError(f"{source}: no such file, and not a hub id like owner/name")
    if source.count(":") > 2:
        raise DataError(
            f"{source}: no such file, and a hub id is owner/name, owner/name:subset or with :split behind it"
        )
    return None


def _read_all(files: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of files; of a log without requests, such as one that a rotation began, that there are none."""
    for name in files:
        try:
            for place, record in records(Path(name)):
                yield {"place": place, "record": record}
        except NoRequestsError as error:
            yield {"place": name, "record": error}
