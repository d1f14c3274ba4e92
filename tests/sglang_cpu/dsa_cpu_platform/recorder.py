"""What the indexers of all processes did, for tests to look at."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

VARIABLE = "DSA_CPU_RECORD"


@dataclass(frozen=True)
class Run:
    """One run of one indexer.

    Attributes:
        process: its process id; each rank has its own.
        mode: SGLang's forward mode, `EXTEND` or `DECODE`.
        requests: for each token the id of its request.
        positions: for each token its position.
        selected: `[tokens, k]` positions, -1 for none; `None` where only index keys were written.
        what: `indexer` for what an indexer chose, `attention` for what a layer attended to (DeepSeek-V4 alone).
    """

    process: int
    layer: int
    mode: str
    requests: tuple[str, ...]
    positions: tuple[int, ...]
    selected: Any
    what: str = "indexer"


def record(layer: int, forward_batch: Any, positions: Tensor, selected: Tensor | None, what: str = "indexer") -> None:
    """Append a run to this process's file, if recording is asked for."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    mode = forward_batch.forward_mode
    # decoding has a row a request; `batch_size` counts rows of padding, too
    lengths = forward_batch.extend_seq_lens_cpu if mode.is_extend() else [1] * len(forward_batch.rids)
    requests = [str(rid) for rid, length in zip(forward_batch.rids, lengths, strict=True) for _ in range(length)]
    if getattr(forward_batch, "attn_cp_metadata", None) is not None:  # each rank has some of the rows
        from sglang.srt.layers.cp.base import get_cp_strategy

        requests = requests[get_cp_strategy().cp_rank :: get_cp_strategy().cp_size]
    run = Run(
        os.getpid(),
        layer,
        mode.name,
        tuple(requests),
        tuple(positions[: len(requests)].tolist()),
        None if selected is None else selected[: len(requests)].numpy().copy(),
        what,
    )
    with (Path(folder) / f"{os.getpid()}.pickle").open("ab") as file:
        pickle.dump(run, file)


def read(folder: Path) -> list[Run]:
    """All runs, by process in the order they happened."""
    return [run for path in sorted(folder.glob("*.pickle")) for run in _read(path)]


def indexers(runs: Iterable[Run]) -> list[Run]:
    """What indexers did, without what attention read."""
    return [run for run in runs if run.what == "indexer"]


def clear(folder: Path) -> None:
    """Forget all runs."""
    for path in folder.glob("*.pickle"):
        path.unlink()


def _read(path: Path) -> Iterator[Run]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return
