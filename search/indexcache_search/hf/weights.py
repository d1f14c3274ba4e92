"""Read all weights of a model's folder into memory, and check their types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from indexcache_search.errors import SearchError
from indexcache_search.hf.tensors import TensorFile, read_tensors
from sglang_indexcache.io.digest import file_digest, side_by_side
from sglang_indexcache.model.files import INDEX, ModelFiles, tensor_files, weight_files, weight_map

SINGLE = "model.safetensors"
_ADAPTER = "adapter_config.json"
_PREFIX = "model."
_FLOATS = ("F32", "BF16", "F16")
_INTEGERS = ("I32", "I64")

# Further types of weights in a quantised checkpoint, by its `quant_method`.
_QUANTISED = {
    "fp8": ("F8_E4M3", "F8_E8M0"),
    "fbgemm_fp8": ("F8_E4M3",),
    "awq": ("I32",),
    "gptq": ("I32",),
    "bitsandbytes": ("U8", "I8"),
    "compressed-tensors": ("I8", "I32", "I64", "U8", "F8_E4M3", "F8_E8M0"),
    "modelopt": ("U8", "F8_E4M3"),
    "mxfp4": ("U8",),
    "quark": ("I8", "U8", "F8_E4M3"),
}


def read_weights(folder: Path, config: Any, whole: set[str], widen: bool) -> tuple[dict[str, Tensor], ModelFiles]:
    """Read and digest the weights that transformers would load.

    Args:
        folder: the model's folder.
        config: its transformers configuration.
        whole: last name parts of tensors that hold integers.
        widen: convert to float32 file by file, which takes less memory than all at once.

    Returns:
        Tensors by the names of the checkpoint, and all files of `weight_files`.

    Raises:
        ModelConfigError: if a file is missing, or changes meanwhile.
        FileError: if one can't be read.
        SearchError: if the files are ambiguous, or a weight has an unexpected type.
    """
    names, quantised = _loaded(folder), getattr(config, "quantization_config", None)

    def read(path: Path, stop: Event) -> TensorFile:
        if path.relative_to(folder).as_posix() not in names:
            return TensorFile({}, {}, file_digest(path, stop))
        found = read_tensors(path, stop)
        for name, kind in found.types.items():
            _check_type(path, name, kind, whole, quantised)
        if widen and quantised is None:
            for name, tensor in found.tensors.items():
                if tensor.is_floating_point():
                    found.tensors[name] = tensor.float()
        return found

    listed = weight_files(folder)
    files = dict(zip(listed, side_by_side(read, (folder / name for name in listed)), strict=True))
    _check_places(folder, files)
    tensors = {name: tensor for file in files.values() for name, tensor in file.tensors.items()}
    return tensors, ModelFiles(folder, weight_files, {name: file.digest for name, file in files.items()})


def _loaded(folder: Path) -> set[str]:
    """Return the names of the files with the weights; refuse a folder with none, or where engines would differ."""
    names = tensor_files(folder)
    if (folder / _ADAPTER).is_file():
        raise SearchError(
            f"{folder / _ADAPTER}: adapters are not loaded; expected a checkpoint that they are merged into"
        )
    if not any(name.endswith(".safetensors") for name in names):
        found = f"found {names[0]}" if names else "found none"
        raise SearchError(f"{folder}: no safetensors file, {found}; expected {SINGLE}, or {INDEX} and its files")
    if (folder / INDEX).is_file():
        if SINGLE not in names and (folder / SINGLE).is_file():
            raise SearchError(f"{folder}: has {SINGLE} and {INDEX}, which names other files; expected one of them")
        return set(names)
    return {SINGLE} if SINGLE in names else set(names)


def _check_type(path: Path, name: str, kind: str, whole: set[str], quantised: Any) -> None:
    method = None if quantised is None else str(quantised.get("quant_method", ""))
    allowed = _INTEGERS if name.rpartition(".")[2] in whole else (*_FLOATS, *_QUANTISED.get(method or "", ()))
    if kind not in allowed:
        why = "no quantization_config" if method is None else f"a quantization_config of {method!r}"
        raise SearchError(f"{path}: {name} is {kind}, expected {' or '.join(allowed)}: config.json has {why}")


def _check_places(folder: Path, files: Mapping[str, TensorFile]) -> None:
    """Check that every tensor is in one file only, and in the one that the index names."""
    place: dict[str, str] = {}
    for file, item in files.items():
        for name in item.tensors:
            if name in place:
                raise SearchError(f"{folder}: {name} stands in {place[name]} and in {file}; expected it once")
            place[name] = file
    for name in place:
        if f"{_PREFIX}{name}" in place:  # transformers takes both for the same weight
            raise SearchError(f"{folder}: has {name} and {_PREFIX}{name}; expected one of them")
    named = weight_map(folder / INDEX) if (folder / INDEX).is_file() else place
    for name in sorted({*named, *place}):
        if named.get(name) != place.get(name):
            raise SearchError(
                f"{folder / INDEX}: {name} stands in {named.get(name, 'no file')}, found it in"
                f" {place.get(name, 'no file')}; expected an index of these files"
            )


def whole_numbers(model: torch.nn.Module) -> set[str]:
    """Return the last name parts of `model`'s tensors that are not floating point."""
    return {name.rpartition(".")[2] for name, value in model.state_dict().items() if not value.is_floating_point()}
