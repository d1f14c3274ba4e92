"""The trained model as a checkpoint that transformers and SGLang load, its pattern in its config.json."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_indexcache import Pattern
from sglang_indexcache.families import describe, family_of_modules
from sglang_indexcache.families.dsa.spellings import to_sglang
from sglang_indexcache.files import write_atomically
from sglang_indexcache.naming import naming
from sglang_indexcache.pattern_file import ModelSection, PatternFile

_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def export(
    model: Any, weights: Mapping[str, Tensor], source: str, pattern: Pattern, folder: Path, keep_shared: bool
) -> None:
    """Write `folder`, as a whole or not at all.

    config.json is the source's own, so that keys which transformers does not know survive, with the pattern in the
    spellings of transformers and of every SGLang. Layers that transformers does not load (NextN/MTP) are copied.

    Args:
        model: knows how its parameters are called in checkpoints.
        weights: all its parameters and buffers, in the dtypes to be written.
        source: folder or hub id that the model came from.
        pattern: what it was trained for.
        folder: replaced if it is there.
        keep_shared: write the indexers of S layers, too; else they are left out.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    origin = local_folder(source)
    family, shared = family_of_modules(model), set(pattern.shared_layers)
    kept = {name: value for name, value in weights.items() if keep_shared or not family.indexer_layers([name]) & shared}
    with naming(partial):
        model.save_pretrained(partial, state_dict=kept, max_shard_size="5GB")
    _copy_other_layers(origin, partial, len(pattern))
    for path in sorted(origin.iterdir()):
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt") and path.name != _INDEX:
            shutil.copy2(path, partial / path.name)
    config = json.loads((origin / "config.json").read_text())
    config.update(to_sglang(pattern))
    write_atomically(partial / "config.json", json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def trained_pattern_file(
    folder: Path, name: str, pattern: Pattern, versions: Mapping[str, str], created: str
) -> PatternFile:
    """The pattern file of an exported model; `name` is for people."""
    model = describe(json.loads((folder / "config.json").read_text()), name)
    return PatternFile(
        schema="indexcache/v1",
        model=ModelSection.of(model),
        pattern=pattern.roles,
        retention=pattern.retention,
        versions=dict(versions),
        created=created,
    )


def local_folder(source: str) -> Path:
    """The folder of a model; for a hub id the cached one that it was loaded from."""
    return Path(source) if Path(source).is_dir() else Path(snapshot_download(source, local_files_only=True))


def _copy_other_layers(origin: Path, folder: Path, layers: int) -> None:
    """Copy the tensors of layers behind the last one, which transformers leaves out, into a file of their own."""
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
    index = folder / _INDEX
    if index.is_file():
        content = json.loads(index.read_text())
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            content = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model.safetensors")}
    content["weight_map"] |= dict.fromkeys(tensors, "model-nextn.safetensors")
    write_atomically(index, json.dumps(content, indent=1) + "\n")
