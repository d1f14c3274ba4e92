"""Export of the trained model as a checkpoint for transformers and SGLang, with the pattern in its config.json."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from indexcache_search.errors import FolderError
from indexcache_search.workdir.lock import LOCK
from sglang_indexcache import Pattern
from sglang_indexcache.families import family_of_modules
from sglang_indexcache.families.dsa.override import to_sglang
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.io.naming import naming
from sglang_indexcache.model.files import INDEX
from sglang_indexcache.pattern_file.result_folder import MARK

_WEIGHTS = re.compile(r"\.(safetensors|bin|pt)(\.index\.json)?$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def export(
    model: Any, weights: Mapping[str, Tensor], origin: Path, pattern: Pattern, folder: Path, *, keep_shared: bool
) -> None:
    """Fill `folder` with the trained model.

    config.json is the original's own, so that keys unknown to transformers survive, with the pattern in the
    spellings of transformers and of every SGLang. Layers that transformers does not load (NextN/MTP) are copied.

    Args:
        model: knows the names of its parameters in checkpoints.
        weights: all parameters and buffers, in the dtypes to be written.
        origin: folder of the original model.
        pattern: the pattern trained for.
        folder: an empty folder.
        keep_shared: write the indexers of S layers, too.
    """
    reader, shared = family_of_modules(model).checkpoint, set(pattern.shared_layers)
    kept = {name: value for name, value in weights.items() if keep_shared or not reader.indexer_layers([name]) & shared}
    with naming(folder):
        model.save_pretrained(folder, state_dict=kept, max_shard_size="5GB")
    _copy_other_layers(origin, folder, len(pattern))
    copy_files(origin, folder)
    config = json.loads((origin / "config.json").read_text())
    config.update(to_sglang(pattern))
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def with_sources(model: Any, weights: Mapping[str, Tensor], pattern: Pattern) -> dict[str, Tensor]:
    """Return `weights` in which S layers have their sources' indexers, where `weights` has indexers of S layers.

    For models that were dense: the indexers of S layers never trained, and transformers runs every indexer of
    DeepSeek-V3.2. There an S layer then selects by its source's weights.
    """
    reader = family_of_modules(model).checkpoint
    filled = dict(weights)
    for name in weights:
        for layer in reader.indexer_layers([name]) & set(pattern.shared_layers):
            source = pattern.source_layers[layer]
            filled[name] = weights[name.replace(f".layers.{layer}.", f".layers.{source}.")].clone()
    return filled


def check_source(source: str) -> None:
    """Refuse a local model whose files can't be copied because a link leads out of its folder.

    Raises:
        FolderError: naming the first such link.
    """
    if Path(source).is_dir():
        _copied(Path(source))


def copy_files(origin: Path, folder: Path, weights: bool = False) -> None:
    """Copy the files beside a checkpoint's weights, and with `weights` these too; subfolders are left out.

    Raises:
        FolderError: as `check_source`.
    """
    for path in _copied(origin):
        if weights or not _WEIGHTS.search(path.name):
            shutil.copyfile(path, folder / path.name)


def _copied(origin: Path) -> list[Path]:
    """List the files of a model; links of the hub's cache may lead to files beside its snapshots."""
    paths = [path for path in sorted(origin.iterdir()) if path.is_file() and path.name not in (MARK, LOCK)]
    real = origin.resolve()
    places = [real, *([real.parent.parent / "blobs"] if real.parent.name == "snapshots" else [])]
    for path in paths:
        if path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in places):
            raise FolderError(f"{path}: leads out of the folder, to {path.resolve()}; expected a file, for the copy")
        if not path.name.isprintable():
            raise FolderError(f"{path}: the name can't be printed, expected another")
    return paths


def _copy_other_layers(origin: Path, folder: Path, layers: int) -> None:
    """Copy the layers behind the last one, which transformers leaves out, into a file of their own."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(origin.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                match = _LAYER.match(name)
                if match is not None and int(match.group(1)) >= layers:
                    tensors[name] = file.get_tensor(name)
    if not tensors:
        return
    with naming(folder / "model-nextn.safetensors"):
        save_file(tensors, folder / "model-nextn.safetensors", metadata={"format": "pt"})
    index = folder / INDEX
    if index.is_file():
        content = json.loads(index.read_text())
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            content = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model.safetensors")}
    content["weight_map"] |= dict.fromkeys(tensors, "model-nextn.safetensors")
    write_atomically(index, json.dumps(content, indent=1) + "\n")
