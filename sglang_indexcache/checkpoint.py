"""A checkpoint on disk or in the hub's cache: its config.json, and which layers have indexer weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import IndexCacheError, ModelConfigError
from sglang_indexcache.model_config import DsaModel
from sglang_indexcache.pattern_file import PatternFile

_INDEX_FILE = "model.safetensors.index.json"
_INDEXER_WEIGHT = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.indexer\.")
_MAX_HEADER_BYTES = 100 << 20


class HubFileError(ModelConfigError):
    """A file that the hub does not have, or that can't be reached."""


@dataclass(frozen=True)
class Checkpoint:
    """What can be known of a model without loading it.

    Attributes:
        model: layers, native sharing, digest.
        indexer_layers: layers with indexer weights, NextN/MTP layers left out; `None` if no weights are at hand.
    """

    model: DsaModel
    indexer_layers: frozenset[int] | None

    @property
    def locked(self) -> tuple[int, ...]:
        """Layers that can't be `F`: shared by config.json, or without indexer weights."""
        layers = set(self.model.locked)
        if self.indexer_layers is not None:
            layers |= set(range(self.model.num_layers)) - self.indexer_layers
        return tuple(sorted(layers))

    @classmethod
    def read(cls, model: str) -> Checkpoint:
        """Read a folder, or a hub id through the hub's client.

        Raises:
            ModelConfigError: if it is not there, or not a DSA model.
        """
        folder = Path(model)
        if folder.is_dir():
            config = _read_json(folder / "config.json")
            names = _tensor_names(folder)
            name = folder.resolve().name
        else:
            config = _read_json(_from_hub(model, "config.json"))
            try:
                names = _index_names(_from_hub(model, _INDEX_FILE))
            except HubFileError:
                names = None
            name = model
        description = DsaModel.from_config(config, name)
        layers = None if names is None else _indexer_layers(names, description.num_layers)
        return cls(description, layers)

    def misfits(self, file: PatternFile, allow_config_mismatch: bool = False) -> list[IndexCacheError]:
        """Everything that speaks against running `file` on this checkpoint; empty if it fits.

        The pattern's length and locked layers come first, then, unless a mismatch is allowed, what the file says of
        the model it was made for.
        """
        checks: list[Callable[[], None]] = [
            lambda: file.as_pattern().check_fits(self.model.num_layers, self.locked),
        ]
        if not allow_config_mismatch:
            checks.append(lambda: file.check_model(self.model))
        found = []
        for check in checks:
            try:
                check()
            except IndexCacheError as error:
                found.append(error)
        return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise ModelConfigError(f"{path}: not JSON") from None
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path}: found {type(content).__name__}, expected a JSON object")
    return content


def _from_hub(model: str, name: str) -> Path:
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelConfigError(f"{model}: no such folder, and not a hub id like owner/name")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ModelConfigError(f"{model}: no such folder, and huggingface_hub is not installed") from None
    try:
        return Path(hf_hub_download(model, name))
    except Exception as error:  # the client has many, and a proxy more
        reason = " ".join(str(error).split())[:160]
        raise HubFileError(f"{model}: {name} can't be had: {reason}") from None


def _tensor_names(folder: Path) -> set[str] | None:
    """Names of all tensors in the folder's safetensors files, read from index or headers; `None` without any."""
    if (folder / _INDEX_FILE).is_file():
        return _index_names(folder / _INDEX_FILE)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    return {name for path in files for name in _header_names(path)}


def _index_names(path: Path) -> set[str]:
    names = _read_json(path).get("weight_map")
    if not isinstance(names, dict):
        raise ModelConfigError(f"{path}: weight_map is missing")
    return set(names)


def _header_names(path: Path) -> Iterable[str]:
    """Tensor names of one safetensors file: eight bytes of header length, then JSON."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _MAX_HEADER_BYTES:
                raise ValueError
            return set(json.loads(file.read(size))) - {"__metadata__"}
    except OSError as error:
        raise ModelConfigError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError):
        raise ModelConfigError(f"{path}: not a safetensors file") from None


def _indexer_layers(names: Iterable[str], num_layers: int) -> frozenset[int]:
    found = (_INDEXER_WEIGHT.search(name) for name in names)
    layers = {int(match.group(1)) for match in found if match is not None}
    return frozenset(layer for layer in layers if layer < num_layers)
