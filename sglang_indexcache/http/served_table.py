"""A table of what servers say about their patterns, and what differs between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_indexcache.http.servers import Counted, Served, ServedRank
from sglang_indexcache.io.errors import one_line

_COMPARED: dict[str, Callable[[ServedRank, Served], Any]] = {  # what equal servers have in common
    "fingerprint": lambda rank, served: served.fingerprint[:16],
    "proven": lambda rank, served: _yes(served.proven),
    "source": lambda rank, served: served.source,
    "SGLang": lambda rank, served: rank.sglang,
    "plugin": lambda rank, served: served.version,
    "proven ranks": lambda rank, served: served.proven_ranks,
    "sharded": lambda rank, served: _sharded(served),
    "grouped layers": lambda rank, served: served.grouped_layers,
    "saved KV": lambda rank, served: served.saved_kv_bytes_per_token,
    "saved weights": lambda rank, served: served.saved_weight_bytes,
}


def differing(found: Sequence[ServedRank]) -> dict[str, dict[str, list[str]]]:
    """Return what differs: the ranks that say each value, by value and by what it is; empty where all is equal."""
    differs: dict[str, dict[str, list[str]]] = {}
    for name, read in _COMPARED.items():
        said: dict[str, list[str]] = {}
        for rank in found:
            value = "no pattern" if rank.served is None else _shown(read(rank, rank.served))
            said.setdefault(value, []).append(rank.name)
        if len(said) > 1:
            differs[name] = said
    return differs


def as_text(found: Sequence[ServedRank]) -> str:
    """Return a table with a row for each rank, then a line for everything that differs."""
    table = [_HEAD, *(_row(rank) for rank in found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, *_differences(found)])


_HEAD = (
    *("server", "proven", "ranks", "F layers", "SGLang", "plugin", "sharded", "grouped layers"),
    *("saved KV", "saved weights", "runs", "skips", "counted in"),
)


def _row(rank: ServedRank) -> tuple[str, ...]:
    served = rank.served
    if served is None:
        return (rank.name, "no pattern", "-", "-", _shown(rank.sglang), *("-" for _ in _HEAD[5:]))
    return (
        rank.name,
        _yes(served.proven),
        _shown(served.proven_ranks),
        _share(served),
        _shown(rank.sglang),
        _shown(served.version),
        _sharded(served),
        _shown(served.grouped_layers),
        "-" if served.saved_kv_bytes_per_token is None else f"{served.saved_kv_bytes_per_token} B/token",
        "-" if served.saved_weight_bytes is None else f"{served.saved_weight_bytes / 1e9:.2f} GB",
        _shown(served.indexer_runs),
        _shown(served.indexer_skips) if served.decode_passes is None else f"{served.decode_passes} decode passes",
        _counted(served.counted),
    )


def _differences(found: Sequence[ServedRank]) -> Iterator[str]:
    for name, said in differing(found).items():
        values = "; ".join(f"{value}: {', '.join(names)}" for value, names in said.items())
        yield one_line(f"differs: {name}: {values}", 4000)


def _share(served: Served) -> str:
    if served.full_layers is None or served.shared_layers is None:
        return "-"
    return f"{served.full_layers} of {served.full_layers + served.shared_layers}"


def _counted(counted: Counted | None) -> str:
    if counted is None:
        return "-"
    seen = [f"{number} {kind}" for kind, number in counted.passes.items()]
    seen += [] if counted.longest_prompt is None else [f"up to {counted.longest_prompt} tokens"]
    return one_line(", ".join(seen + [f"{kind} to come" for kind in counted.to_come]), 120) or "-"


def _sharded(served: Served) -> str:
    return f"{served.sharded_layers} layers, {served.sharded_ranks} ranks" if served.sharded_layers else "no"


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _shown(value: object) -> str:
    return "-" if value is None else one_line(value, 120)
