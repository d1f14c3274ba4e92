"""Training sequences on disk, and the order in which steps take them."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import JournalError
from sglang_indexcache.files import read_regular, write_atomically

_MAX_BYTES = 16 << 20
_ARRAYS = ("tokens", "scored", "source_of")


class _About(BaseModel):
    """What stands beside the arrays."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sources: list[str]
    sha256: str


def save_set(data: TokenSet, folder: Path) -> None:
    """Write a set to `folder`; `load_set` finds it only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(data, name))
    about = _About(sources=list(data.sources), sha256=data.sha256)
    write_atomically(folder / "set.json", about.model_dump_json() + "\n")


def load_set(folder: Path) -> TokenSet | None:
    """The set in `folder`, read as it is used; `None` if there is none.

    Raises:
        JournalError: if it is not what was written.
    """
    path = folder / "set.json"
    if not path.is_file():
        return None
    try:
        about = _About.model_validate_json(read_regular(path, _MAX_BYTES))
        tokens, scored, source_of = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS
        )
        data = TokenSet(tokens, scored, source_of, tuple(about.sources))
        if data.tokens.ndim != 2 or data.scored.shape != data.tokens.shape or data.sha256 != about.sha256:
            raise ValueError
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise
        raise JournalError(f"{folder}: the stored tokens are damaged; --restart reads the data anew") from None
    return data


class Order:
    """An endless stream of rows: every epoch takes each row once, shuffled anew.

    Args:
        rows: how many there are.
        seed: of the shuffles; the same seed gives the same stream everywhere.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def step(self, step: int, batch_size: int) -> NDArray[np.int64]:
        """Rows of a step, counted from 0."""
        return np.array([self._at(place) for place in range(step * batch_size, (step + 1) * batch_size)])

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, self._rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
        return int(self._permutation[within])
