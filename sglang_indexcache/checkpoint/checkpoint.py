"""A checkpoint on disk or in the hub's cache: its config.json, which layers have indexer weights, and digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.base import Family
from sglang_indexcache.io.atomic import read_json_object, reason
from sglang_indexcache.io.errors import IndexCacheError, ModelConfigError
from sglang_indexcache.io.faults import is_pointer, other_kind
from sglang_indexcache.model.files import CONFIG, INDEX, ModelFiles, weight_files, weight_map
from sglang_indexcache.model.layers import ModelLayers
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.file import PatternFile
from sglang_indexcache.pattern_file.remote import quiet_hub, why
from sglang_indexcache.sglang.override_flag import FLAG, merged

_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100 << 20
_NO_MODELS = (".gguf", "adapter_config.json")  # endings of files that hold weights in another form, or a part of them
_MAX_POINTER_BYTES = 1024
_NO_POINTERS = (".json", ".safetensors", ".bin", ".model", ".tiktoken")  # endings of a checkpoint's own files


class HubFileError(ModelConfigError):
    """A file that the hub does not have, or that can't be reached."""


@dataclass(frozen=True)
class Checkpoint:
    """The facts about a model that are known without loading it.

    Attributes:
        model: layers, native sharing, digest.
        indexer_layers: model layers with indexer weights, NextN/MTP layers left out; `None` if no weights are at hand.
        path: the folder or hub id that it was read from.
        config: content of its config.json, with overrides.
    """

    model: ModelLayers
    indexer_layers: frozenset[int] | None
    path: str
    config: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def locked(self) -> tuple[int, ...]:
        """Letters that can't be `F`: shared by config.json, or without indexer weights."""
        letters = set(self.model.locked)
        if self.indexer_layers is not None:
            letters |= {letter for letter, layer in enumerate(self.model.layers) if layer not in self.indexer_layers}
        return tuple(sorted(letters))

    @property
    def family(self) -> Family:
        """Family of the model's architecture."""
        return family_of(self.model.architecture)

    @classmethod
    def read(cls, model: str, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
        """Read a folder, or a hub id through the hub's client.

        Args:
            model: folder or hub id.
            overrides: `--json-model-override-args`, which make it another model unless they say what config.json says.

        Raises:
            IndexCacheError: if it is not there, or of no known family.
        """
        config, name = read_config(model)
        if overrides:
            config, name = merged(config, overrides), f"{name} with {FLAG}"
        names = _tensor_names(model)
        description = describe(config, name)
        if names is None:
            return cls(description, None, model, config)
        with_indexer = family_of(description.architecture).checkpoint.indexer_layers(names)
        return cls(description, with_indexer.intersection(description.layers), model, config)

    def misfits(
        self, pattern: Pattern, file: PatternFile | None = None, allow_config_mismatch: bool = False
    ) -> list[IndexCacheError]:
        """Return every reason against running `pattern` on this checkpoint; an empty list if it fits.

        The kind of its letters is checked first, then its length and locked layers. Unless a mismatch is allowed, the
        model that `file` was made for comes last.
        """
        checks: list[Callable[[], None]] = [
            lambda: pattern.check_kind(self.model.native),
            lambda: pattern.check_fits(self.model.num_layers, self.locked),
        ]
        if file is not None and not allow_config_mismatch:
            checks.append(lambda: file.model.check(self.model))
        errors = []
        for check in checks:
            try:
                check()
            except IndexCacheError as error:
                errors.append(error)
        return errors


def read_config(model: str) -> tuple[dict[str, Any], str]:
    """Read config.json of a folder or hub id, and the model's name.

    Raises:
        IndexCacheError: if it is not there, or not a JSON object of reasonable size.
    """
    named = ModelName.parse(model)
    if named.folder is None:
        return read_json_object(_from_hub(model, CONFIG), _MAX_CONFIG_BYTES), named.name
    _check_no_pointers(named.folder)
    if not (named.folder / CONFIG).exists():
        other = next((path.name for path in sorted(named.folder.glob("*")) if path.name.endswith(_NO_MODELS)), None)
        if other is not None:
            raise ModelConfigError(f"{named.folder}: has {other} and no config.json; expected a whole checkpoint")
    return read_json_object(named.folder / CONFIG, _MAX_CONFIG_BYTES), named.name


def weights_digest(model: str) -> str:
    """Return the sha256 of config.json and all weights of a folder, see `weight_files`; of a hub id that of its commit.

    Raises:
        IndexCacheError: if a file can't be read.
    """
    named = ModelName.parse(model)
    if named.folder is not None:
        return ModelFiles.read(named.folder, weight_files).sha256
    commit = _from_hub(model, CONFIG).parent.name
    return hashlib.sha256(f"{named.repository}@{commit}".encode()).hexdigest()


def _check_no_pointers(folder: Path) -> None:
    """Check that no file is a Git LFS pointer, which `git clone` leaves where Git LFS is not installed."""
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in _NO_POINTERS and path.is_file() and path.stat().st_size <= _MAX_POINTER_BYTES:
                with path.open("rb") as file:
                    beginning = file.read(_MAX_POINTER_BYTES)
                if is_pointer(beginning):
                    raise ModelConfigError(f"{path}: {other_kind(beginning)}")
    except OSError as error:
        raise ModelConfigError(f"{folder}: {reason(error)}") from None


def _from_hub(model: str, name: str) -> Path:
    named = ModelName.parse(model)
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ModelConfigError(
            f"{model}: no such folder, and huggingface_hub is not installed; expected: pip install huggingface_hub"
        ) from None
    try:
        with quiet_hub():
            return Path(hf_hub_download(named.repository, name, revision=named.revision))
    except Exception as error:  # the client has many, and a proxy more
        raise HubFileError(f"{model}: no such folder, and {name} can't be had from the hub: {why(error)}") from None


def _tensor_names(model: str) -> Iterable[str] | None:
    """Read the names of all tensors, from the index or from headers; `None` where no weights are at hand."""
    folder = ModelName.parse(model).folder
    if folder is None:
        try:
            return weight_map(_from_hub(model, INDEX))
        except HubFileError:
            return None
    if (folder / INDEX).is_file():
        return weight_map(folder / INDEX)
    files = sorted(folder.glob("*.safetensors"))
    return {name for path in files for name in _header_names(path)} if files else None


def _header_names(path: Path) -> Iterable[str]:
    """Read the tensor names of one safetensors file from its header: eight bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= _MAX_HEADER_BYTES:
                raise ValueError
            content = json.loads(file.read(size))
            data_bytes = path.stat().st_size - 8 - size
            for name, tensor in content.items():
                if (
                    name != "__metadata__"
                    and not 0 <= tensor["data_offsets"][0] <= tensor["data_offsets"][1] <= data_bytes
                ):
                    raise ModelConfigError(f"{path}: is cut off: {name} is not all there")
            return set(content) - {"__metadata__"}
    except OSError as error:
        raise ModelConfigError(f"{path}: {reason(error)}") from None
    except ModelConfigError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ModelConfigError(f"{path}: not a safetensors file") from None
