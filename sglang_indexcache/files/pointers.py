"""Git LFS pointers: files that `git clone` leaves of a checkpoint where Git LFS is not installed."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.errors import ModelConfigError
from sglang_indexcache.files.atomic import reason

_BEGINNING = b"version https://git-lfs.github.com/spec/"
_MOST_BYTES = 1024
_ENDINGS = (".json", ".safetensors", ".bin", ".model", ".tiktoken")


def check_no_pointers(folder: Path) -> None:
    """Check that the files of a checkpoint are the files themselves.

    Raises:
        ModelConfigError: naming one that is a Git LFS pointer.
    """
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in _ENDINGS and path.is_file() and path.stat().st_size <= _MOST_BYTES:
                with path.open("rb") as file:
                    beginning = file.read(len(_BEGINNING))
                if beginning == _BEGINNING:
                    raise ModelConfigError(
                        f"{path}: a Git LFS pointer, not the file itself; expected `git lfs pull` in that folder, or a"
                        " download by `hf download`"
                    )
    except OSError as error:
        raise ModelConfigError(f"{folder}: {reason(error)}") from None
