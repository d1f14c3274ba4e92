"""Select the data files of a folder, which may also hold documentation and metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from indexcache_search.data.formats import ENDINGS, kind_of
from indexcache_search.errors import DataError
from sglang_indexcache.io.atomic import read_json_object

_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}  # written by `datasets`
_SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev", "test": "test|testing|eval|evaluation"}
_NAMED = {split: re.compile(rf"(?:^|[^a-z])(?:{words})(?:[^a-z]|$)") for split, words in _SPLITS.items()}
_MAX_BYTES = 16 << 20


def data_files(folder: Path, notice: Callable[[str], None]) -> list[Path]:
    """Return the files of `folder` that hold data, in reading order.

    Skips hidden files, metadata that `datasets` writes, documentation beside tables, and validation and test splits
    where there is another split; `notice` is called with a line about each that a user may expect to be read.

    Raises:
        DataError: if there are none, or several kinds or splits.
    """
    if (folder / "dataset_dict.json").is_file():
        return _saved_split(folder, notice)
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved(folder)
    kinds = {
        path: kind
        for path in sorted(folder.rglob("*"))
        if (kind := kind_of(path)) is not None and path.name not in _ABOUT and _shown(path, folder) and path.is_file()
    }
    if not kinds:
        raise DataError(f"{folder}: no file in this folder ends with {ENDINGS}")
    tables = [path for path, kind in kinds.items() if kind not in ("text", "log")]
    logs = [path for path, kind in kinds.items() if kind == "log"]
    chosen = tables or logs or [path for path in kinds if path != folder / "README.md"] or list(kinds)
    if len({kinds[path] for path in chosen}) > 1:
        found = ", ".join(sorted({path.suffix for path in chosen}))
        raise DataError(f"{folder}: holds {found} files, expected one kind; name the file or folder that is meant")
    files = _of_one_split(folder, chosen)
    for left, why in ((kinds.keys() - set(chosen), "no data"), (set(chosen) - set(files), "held out by its name")):
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            notice(f"{folder}: {min(left).relative_to(folder)}{more} is not read: {why}")
    return files


def _shown(path: Path, folder: Path) -> bool:
    return not any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)


def _of_one_split(folder: Path, files: list[Path]) -> list[Path]:
    """Leave out files for validation and tests, unless there are no others."""
    splits = {path: _split(path.relative_to(folder)) for path in files}
    names = {split for split in splits.values() if split in ("validation", "test")}
    others = [path for path in files if splits[path] not in names]
    if len(names) > 1 and not others:
        raise DataError(f"{folder}: holds the splits {' and '.join(sorted(names))}; name the file that is meant")
    return others or files


def _split(path: Path) -> str | None:
    """Return the split that a path names, as on the hub: `data/train-00000-of-00002.parquet`."""
    text = path.as_posix().lower()
    return next((split for split, words in _NAMED.items() if words.search(text)), None)


def _saved_split(folder: Path, notice: Callable[[str], None]) -> list[Path]:
    """Return the split `train` of a saved `DatasetDict`, or its only one."""
    splits = read_json_object(folder / "dataset_dict.json", _MAX_BYTES).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(name, str) and name for name in splits):
        raise DataError(f"{folder / 'dataset_dict.json'}: splits is {json.dumps(splits)}, expected a list of names")
    split = splits[0] if len(splits) == 1 else "train"
    if split not in splits or Path(split).name != split:
        raise DataError(
            f"{folder}: holds the splits {', '.join(splits)}; name the folder of one, such as {folder / splits[0]}"
        )
    if len(splits) > 1:
        notice(f"{folder}: of the splits {', '.join(splits)} {split} is read")
    return _saved(folder / split)


def _saved(folder: Path) -> list[Path]:
    """Return the files that `Dataset.save_to_disk` wrote, without cache files beside them."""
    state = folder / "state.json"
    listed = read_json_object(state, _MAX_BYTES).get("_data_files")
    names = [item.get("filename") if isinstance(item, dict) else None for item in listed] if listed else []
    if not isinstance(listed, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{state}: _data_files is not a list of file names")
    files = [folder / str(name) for name in names]
    for file in files:
        if kind_of(file) is None or not file.is_file():
            raise DataError(f"{file}: no such file, but state.json lists it")
    return files
