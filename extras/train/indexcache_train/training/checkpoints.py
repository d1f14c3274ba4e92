"""Training checkpoints: trainable weights, optimizer state, and the step, with each process's share in its own files.

Files are safetensors and JSON with checksums. Reading them runs no code, and a file cut short by a kill or a full disk
is noticed, so that the checkpoint before it is used. The number of processes is part of a run's identity.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from indexcache_search.errors import JournalError, NonFiniteLossError
from indexcache_train.training.processes import Processes
from sglang_indexcache.io.atomic import read_regular, write_atomically
from sglang_indexcache.io.errors import FileError
from sglang_indexcache.io.naming import naming

_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
_MANIFEST = "checkpoint.json"
_MAX_BYTES = 16 << 20
_FILE = re.compile(r"process-\d+\.(safetensors|json)|checkpoint\.json|\..+\.[0-9a-f]{32}\.partial")
_NAME = re.compile(r"step-(\d{6,})")
KEPT = 2


class _Manifest(BaseModel):
    """Step of a complete checkpoint, and the sha256 of its files."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: int
    files: dict[str, str]


class Checkpoints:
    """The checkpoints of a run, one folder each; only a complete checkpoint has its final folder name.

    Args:
        folder: parent of their folders.
        processes: all processes of the run.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self._folder, self._processes = folder, processes

    def latest(self) -> int:
        """Return the steps done at the last intact checkpoint; 0 if there is none.

        Raises:
            JournalError: if there are checkpoints, but all are damaged.
        """
        complete = self._complete()
        for path in reversed(complete):
            if self._is_whole(path):
                return _step(path)
        if complete:
            raise JournalError(f"{complete[-1]}: is damaged, and no other checkpoint is whole; --restart trains anew")
        return 0

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint at `step`."""
        return self._folder / f"step-{step:06d}"

    def save(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Write a checkpoint, then delete all but the last two."""
        partial, main = self._folder / "partial", self._processes.first
        weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
        if main:
            _remove(partial)
            partial.mkdir(parents=True)
        self._processes.wait()
        tensors, rest = _split({"model": weights, "optimizer": state})
        share = partial / f"process-{self._processes.index}"
        paths = share.with_suffix(".safetensors"), share.with_suffix(".json")
        with naming(paths[0]):
            save_file(tensors, paths[0])
        write_atomically(paths[1], json.dumps(rest) + "\n")
        every = self._processes.gather({path.name: _sha256(path) for path in paths})
        if main:
            manifest = _Manifest(step=step, files={key: value for item in every for key, value in item.items()})
            write_atomically(partial / _MANIFEST, manifest.model_dump_json() + "\n")
            _remove(self.path(step))
            partial.rename(self.path(step))
            for old in self._complete()[:-KEPT]:
                _remove(old)
        self._processes.wait()

    def load(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Read a checkpoint into a model with the same trainable parameters as when it was written.

        Raises:
            JournalError: if the checkpoint holds other weights.
        """
        weights, state = get_state_dict(model, optimizer, options=_OPTIONS)
        current = {"model": weights, "optimizer": state}
        path = self.path(step) / f"process-{self._processes.index}"
        tensors = load_file(path.with_suffix(".safetensors"))
        rest = json.loads(read_regular(path.with_suffix(".json"), _MAX_BYTES))
        own, _ = _split(current)
        if set(own) != set(tensors) or any(own[name].shape != tensors[name].shape for name in own):
            raise JournalError(f"{path}: holds other weights than this model trains; --restart trains anew")
        read = {**rest, **tensors}
        weights, state = _mapped(current, lambda name, value: _like(value, read[name])).values()
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=_OPTIONS)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the last good checkpoint to the message of a `NonFiniteLossError` inside the `with` block."""
        try:
            yield
        except NonFiniteLossError as error:
            step = self.latest()
            kept = f"the last good checkpoint is {self.path(step)}" if step else "there is no checkpoint yet"
            raise NonFiniteLossError(f"{error}; {kept}") from None

    def _is_whole(self, path: Path) -> bool:
        try:
            manifest = _Manifest.model_validate_json(read_regular(path / _MANIFEST, _MAX_BYTES))
            return manifest.step == _step(path) and all(
                _sha256(path / name) == digest for name, digest in manifest.files.items()
            )
        except (FileError, OSError, ValidationError):
            return False

    def _complete(self) -> list[Path]:
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove(folder: Path) -> None:
    """Remove a checkpoint; foreign files stay, and with them the folder."""
    for path in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        if _FILE.fullmatch(path.name):
            path.unlink()
    with suppress(OSError):
        folder.rmdir()


def _mapped(tree: Any, change: Callable[[str, Any], Any], *path: str) -> Any:
    """Apply `change` to names and values of all but mappings; lists of mappings count as mappings by number."""
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change, *path, str(key)) for key, value in tree.items()}
    if isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        return [_mapped(value, change, *path, str(number)) for number, value in enumerate(tree)]
    return change("|".join(path), tree)


def _split(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split a tree into this process's share of all tensors, by name, and the other values."""
    tensors, rest = {}, {}

    def take(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            tensors[name] = (value.to_local() if isinstance(value, DTensor) else value).detach().contiguous().cpu()
        else:
            rest[name] = value

    _mapped(tree, take)
    return tensors, rest


def _like(current: Any, read: Any) -> Any:
    """Move a tensor that was read to where the current one is; sharded ones are sharded as they are now."""
    if isinstance(current, DTensor):
        mesh, placements = current.device_mesh, current.placements
        local = read.to(current.to_local())
        return DTensor.from_local(local, mesh, placements, shape=current.shape, stride=current.stride())
    return read.to(current) if isinstance(current, Tensor) else read


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
