"""Training and held-out sequences of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from indexcache_search import demo
from indexcache_search.console import warn
from indexcache_search.data import dry_run
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.templates import AS_THEY_ARE, RowOptions
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import DataError
from indexcache_search.hf.loading import load_tokenizer, read_config
from indexcache_train.training.processes import Processes
from indexcache_train.training.settings import Folders
from indexcache_train.training.stored import load_set, save_set
from sglang_indexcache import ModelLayers
from sglang_indexcache.io.digest import file_digest


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Sources and sizes of the training and the held-out set, and the reading of rows; for `apart` see `Packer`."""

    training: tuple[str, ...]
    evaluation: tuple[str, ...]
    seq_len: int
    num_sequences: int
    num_eval_sequences: int
    rows: RowOptions = AS_THEY_ARE
    apart: bool = False

    def reads(self, model: str) -> dict[str, Sequence[str]]:
        """Return the inputs by option, for `check_apart`."""
        return {"--model": [model], "--training": self.training, "--evaluation": self.evaluation}

    def contents(self) -> dict[str, str | None]:
        """Return a digest of the content of each source.

        Raises:
            FileError: if a source can't be read.
        """
        return {f"sha256 of {source}": _content_digest(source) for source in {*self.training, *self.evaluation}}


def training_sets(
    model: str,
    description: ModelLayers,
    data: TrainingData,
    identity: Mapping[str, Any],
    seed: int,
    *,
    folders: Folders,
    processes: Processes,
    console: Console,
) -> tuple[TokenSet, TokenSet]:
    """Read both sets once and keep them as token ids, so that a resumed run trains on the same ones.

    Args:
        model: folder or hub id, for its tokenizer.
        description: of the model; for dense models prompts and replies are separated.
        data: sources and sizes.
        identity: has digests of the sources when the run began.
        seed: seed of the order of the training documents.
        folders: the sets are kept in their work folder.
        processes: the first of them reads.
        console: shows notes of the reader.

    Raises:
        IndexCacheError: if a source can't be read or holds too little, or a kept set is damaged.
    """
    places = [folders.work / "data" / name for name in ("training", "held-out")]
    with processes.first_before_others():
        if any(load_set(folder) is None for folder in places):
            reader, *sets = _read(model, description, data, seed)
            for note in reader.notes:
                warn(console, note)
            changed = [name for name, digest in data.contents().items() if digest != identity[name]]
            if changed:
                raise DataError(f"{changed[0]} changed while it was read, expected data that stay as they are")
            for tokens, folder in zip(sets, places, strict=True):
                save_set(tokens, folder)
    train, held_out = (load_set(folder) for folder in places)
    assert train is not None and held_out is not None
    return train, held_out


def show_data(model: str, description: ModelLayers, data: TrainingData, seed: int) -> None:
    """Read both sets, print what was read, and keep nothing.

    Raises:
        IndexCacheError: as `training_sets`.
    """
    reader, train, held_out = _read(model, description, data, seed)
    dry_run.show(reader, {"evaluation": held_out, "training": train})


def _read(
    model: str, description: ModelLayers, data: TrainingData, seed: int
) -> tuple[TokenReader, TokenSet, TokenSet]:
    replies = description.dense
    vocab_size = read_config(model).vocab_size
    reader = TokenReader(lambda: load_tokenizer(model), vocab_size, data.seq_len, replies, data.rows)
    packer = Packer(reader, description, data.seq_len, apart=data.apart)
    held_out = packer.held_out(data.evaluation, data.num_eval_sequences, data.training)
    return reader, packer.collect(data.training, data.num_sequences, seed, "training"), held_out


def _content_digest(source: str) -> str | None:
    """Return the sha256 of all bytes and file names of a source; `None` for a hub id."""
    path = demo.data_file(source.removeprefix("demo:")) if source.startswith("demo:") else Path(source)
    if path.is_file():
        return file_digest(path).sha256
    if not path.exists():
        return None
    digest = hashlib.sha256()
    for inner in sorted(path.rglob("*")):
        if inner.is_file():
            digest.update(f"{inner.relative_to(path).as_posix()!r} {file_digest(inner).sha256}\n".encode())
    return digest.hexdigest()
