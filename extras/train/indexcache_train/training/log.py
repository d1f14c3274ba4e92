"""The log of a training run: JSON lines that a resumed run continues without gaps or repeats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indexcache_search.errors import JournalError
from indexcache_search.evaluation.records import Sealer, append, complete, damaged, opened
from sglang_indexcache.io.atomic import write_atomically


class TrainingLog:
    """Records as JSON lines with checksums; the `step` of each is the number of steps done.

    Args:
        path: the file.
        step: records of later steps are dropped, since these steps are done again; 0 drops all.
        tensorboard: folder for TensorBoard event files, or None.

    Raises:
        JournalError: if a line is damaged, or none is of `step`.
    """

    def __init__(self, path: Path, step: int, tensorboard: Path | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.records: list[dict[str, Any]] = []
        content = complete(path.read_bytes()) if path.is_file() else b""  # a kill may have cut off the last line
        for number, record in opened(content, str(path), Sealer()):
            if type(record.get("step")) is not int:
                raise damaged(path, number)
            if 0 < step >= record["step"]:
                self.records.append(record)
        if step and not any(record["step"] == step for record in self.records):
            raise JournalError(f"{path}: does not reach step {step} of the checkpoint; --restart trains anew")
        self._sealer = Sealer()
        write_atomically(path, "".join(self._sealer.seal(record).decode() for record in self.records))
        self._file = path.open("ab")
        self._writer: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard), purge_step=step + 1)

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is on disk when this returns."""
        self.records.append(dict(record))
        append(self._file, self._sealer, record)
        if self._writer is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()
