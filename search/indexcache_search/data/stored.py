"""Token sets on disk, so that a resumed run or another machine has the same ones."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import JournalError
from sglang_indexcache.files.atomic import read_regular, write_atomically
from sglang_indexcache.files.naming import naming

_MAX_BYTES = 16 << 20
_ARRAYS = ("tokens", "scored", "source_of")
_PROMPT = "prompt"


class _About(BaseModel):
    """Metadata beside the arrays."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sources: list[str]
    sha256: str
    prompt: bool = False


def save_set(data: TokenSet, folder: Path) -> None:
    """Write a set to `folder`; `load_set` finds it only once it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*_ARRAYS, *(() if data.prompt is None else (_PROMPT,))):
        path = folder / f"{name}.npy"
        with naming(path):
            np.save(path, getattr(data, name))
    about = _About(sources=list(data.sources), sha256=data.sha256, prompt=data.prompt is not None)
    write_atomically(folder / "set.json", about.model_dump_json() + "\n")


def load_set(folder: Path) -> TokenSet | None:
    """Load the set in `folder`, memory-mapped; return `None` if there is none.

    Raises:
        JournalError: if the stored set is damaged.
    """
    path = folder / "set.json"
    if not path.is_file():
        return None
    try:
        about = _About.model_validate_json(read_regular(path, _MAX_BYTES))
        tokens, scored, source_of, *prompt = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in (*_ARRAYS, *((_PROMPT,) if about.prompt else ()))
        )
        data = TokenSet(tokens, scored, source_of, tuple(about.sources), *prompt)
        if data.tokens.ndim != 2 or data.scored.shape != data.tokens.shape or data.sha256 != about.sha256:
            raise ValueError
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise
        raise JournalError(f"{folder}: the stored tokens are damaged; --restart reads the data anew") from None
    return data
