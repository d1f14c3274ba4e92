"""Separation of the paths that a command reads from those that it writes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from indexcache_search.errors import FolderError

_VARIABLE = re.compile(r"\$[{(A-Za-z_]")
_exists = os.path.exists  # unlike `Path.exists`, false for what is no valid path


def check_apart(writes: Mapping[str, Path], names: Iterable[Path], reads: Mapping[str, Iterable[str]]) -> None:
    """Check that no folder that is read and none that is written contain each other, and that no file is both.

    What is written has no `~` or variable in its name, which a shell left there. Paths are resolved, including links
    and `..`.

    Args:
        writes: output options and their folders.
        names: files and folders that are written or replaced as a whole.
        reads: input options and their values: files, folders, or names that are not paths.

    Raises:
        FolderError: if paths overlap; it names both options.
    """
    for option, folder in writes.items():
        if folder.parts[:1] and (folder.parts[0].startswith("~") or _VARIABLE.search(str(folder))):
            raise FolderError(f"{option} is {folder}, where ~ or $ was not written out; expected a whole path")
    own = list(names)
    for option, texts in reads.items():
        for text in texts:
            path = Path(text)
            if not _exists(path):
                continue
            for other, folder in writes.items():
                met = path.is_dir() and (_is_in(path, folder) or _is_in(folder, path))
                if met or any(_is_in(path, name) for name in own):
                    raise FolderError(
                        f"{option} is {text} and {other} is {folder}: what is read and what is written overlap;"
                        f" choose another {other}"
                    )


def _is_in(path: Path, folder: Path) -> bool:
    """Return true if `path`, which need not exist, is `folder` or lies in it."""
    if not _exists(folder):
        return False
    real = path.resolve()
    return any(_exists(place) and place.samefile(folder) for place in (real, *real.parents))
