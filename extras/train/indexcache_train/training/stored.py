"""Token sets on disk, so that a resumed run or another machine has the same ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import JournalError
from sglang_indexcache.io.atomic import read_json_object, write_atomically
from sglang_indexcache.io.naming import naming

_MAX_BYTES = 16 << 20
_ARRAYS = ("tokens", "scored", "source_of")
_OPTIONAL = ("prompt", "starts")


def save_set(data: TokenSet, folder: Path) -> None:
    """Write a set to `folder`; `load_set` finds it only once it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    has = {name: getattr(data, name) is not None for name in _OPTIONAL}
    for name in (*_ARRAYS, *(name for name in _OPTIONAL if has[name])):
        path = folder / f"{name}.npy"
        with naming(path):
            np.save(path, getattr(data, name))
    about = {"sources": data.sources, "sha256": data.sha256, **has}
    write_atomically(folder / "set.json", json.dumps(about) + "\n")


def load_set(folder: Path) -> TokenSet | None:
    """Load the set in `folder`, memory-mapped; return `None` if there is none.

    Raises:
        JournalError: if the stored set is damaged.
    """
    path = folder / "set.json"
    if not path.is_file():
        return None
    try:
        about = read_json_object(path, _MAX_BYTES)
        names = (*_ARRAYS, *(name for name in _OPTIONAL if about.get(name)))
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
        data = TokenSet(sources=tuple(about["sources"]), **arrays)
        shapes = {array.shape for name, array in arrays.items() if name != "source_of"}
        if data.tokens.ndim != 2 or len(shapes) > 1 or data.sha256 != about["sha256"]:
            raise ValueError
    except (FileNotFoundError, EOFError, KeyError, TypeError, ValueError):
        raise JournalError(f"{folder}: the stored tokens are damaged; --restart reads the data anew") from None
    return data
