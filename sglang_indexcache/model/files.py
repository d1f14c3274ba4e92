"""The files that make a model what it is, and their digest: all bytes, so that no two models are taken for one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sglang_indexcache.io.atomic import read_json_object, reason
from sglang_indexcache.io.digest import Digest, Stamp, file_digest, side_by_side
from sglang_indexcache.io.errors import FileError, ModelConfigError
from sglang_indexcache.io.messages import MODEL_CHANGED

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_HEADS = "_heads"  # ending of folders beside the weights that hold heads trained for the model
_MAX_INDEX_BYTES = 100 << 20
_PICKLES = (".bin", ".pt", ".pth")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model's folder as they were when they were read.

    Attributes:
        folder: where they are.
        listed: returns the names of the files that count, relative to the folder.
        digests: digest of each of them.
    """

    folder: Path
    listed: Callable[[Path], list[str]]
    digests: Mapping[str, Digest]

    @classmethod
    def read(cls, folder: Path, listed: Callable[[Path], list[str]]) -> Self:
        """Digest the files that `listed` names.

        Raises:
            IndexCacheError: if one is not there, can't be read, or changes meanwhile.
        """
        names = listed(folder)
        digests = side_by_side(file_digest, (folder / name for name in names))
        return cls(folder, listed, dict(zip(names, digests, strict=True)))

    @property
    def sha256(self) -> str:
        """Digest of the names of all files and of all bytes in them, in hex."""
        lines = (f"{name} {digest.sha256}\n" for name, digest in sorted(self.digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_loaded(self, found: ModelFiles) -> None:
        """Check that the files that were loaded are the same as these.

        Raises:
            ModelConfigError: naming the first file that is not.
        """
        for name in sorted({*self.digests, *found.digests}):
            known, loaded = self.digests.get(name), found.digests.get(name)
            if known is None or loaded is None or known.sha256 != loaded.sha256:
                raise _changed(self.folder / name)

    def check(self) -> None:
        """Check that the files are still those that were read; a file that was only touched is read again.

        Raises:
            ModelConfigError: naming the first one that is not.
        """
        names = self.listed(self.folder)
        for name in sorted({*names, *self.digests}):
            known, path = self.digests.get(name), self.folder / name
            if known is None or name not in names:
                raise _changed(path)
            try:
                if Stamp.of(path.stat()) == known.stamp or file_digest(path).sha256 == known.sha256:
                    continue
            except (OSError, FileError):
                pass
            raise _changed(path)


def _changed(path: Path) -> ModelConfigError:
    return ModelConfigError(
        f"{path}: {MODEL_CHANGED}; expected the same files until results are written: put it back and run again"
    )


def weight_files(folder: Path) -> list[str]:
    """List config.json and all files with weights: those of the index, else all safetensors, else pickles.

    Heads that were trained for the model are among them.

    Raises:
        IndexCacheError: if the folder or its index can't be read, or the index names a file that is not there.
    """
    index = [INDEX] if (folder / INDEX).is_file() else []
    config = files_named(folder, lambda name: name == CONFIG)
    heads = [f"{beside.name}/{name}" for beside in folder.glob(f"*{_HEADS}/") for name in _safetensors(beside)]
    return sorted([*config, *index, *tensor_files(folder), *heads])


def tensor_files(folder: Path) -> list[str]:
    """List the files of `weight_files` that hold the weights themselves, which engines may load.

    Raises:
        IndexCacheError: as `weight_files`.
    """
    if (folder / INDEX).is_file():
        names = sorted(set(weight_map(folder / INDEX).values()))
        for name in names:
            if not (folder / name).is_file():
                raise ModelConfigError(f"{folder / INDEX}: names {name!r}, and there is no such file beside it")
        return names
    return _safetensors(folder) or files_named(folder, lambda name: name.endswith(_PICKLES))


def weight_map(index: Path) -> dict[str, str]:
    """Return the file beside `index` that holds each tensor.

    Raises:
        IndexCacheError: if it can't be read, or names something else than files beside it.
    """
    names = read_json_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict):
        raise ModelConfigError(f"{index}: weight_map is missing")
    for name in dict.fromkeys(names.values()):
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelConfigError(f"{index}: names {name!r}, and there is no such file beside it")
    return names


def files_named(folder: Path, wanted: Callable[[str], bool]) -> list[str]:
    """List the files of a folder whose names are `wanted`, without hidden ones.

    Raises:
        ModelConfigError: if the folder can't be read.
    """
    try:
        found = (path for path in folder.iterdir() if not path.name.startswith(".") and path.is_file())
        return sorted(path.name for path in found if wanted(path.name))
    except OSError as error:
        raise ModelConfigError(f"{folder}: {reason(error)}") from None


def _safetensors(folder: Path) -> list[str]:
    return files_named(folder, lambda name: name.endswith(".safetensors"))
