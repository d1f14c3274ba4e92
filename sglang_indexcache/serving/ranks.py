"""Agreement of ranks: all ranks of a server, on all its nodes, serve one pattern, or none does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from sglang_indexcache.io.errors import ProofError
from sglang_indexcache.io.refusal import PATTERN_VARIABLE, SHARD_VARIABLE, UNION_VARIABLE, refuse
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern.indexer_setting import IndexerSetting
from sglang_indexcache.pattern.selection import PatternSelection

Value = TypeVar("Value")
MEET_VARIABLE = "SGLANG_INDEXCACHE_MEET_SECONDS"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The report of one rank; `roles` has a letter for each layer, `-` for layers that are on other ranks.

    `indexers` are those of this rank's layers that select in blocks, `shared_rows` over how many ranks its layers share
    out the rows of prompts; `shard` and `unions` say what the rank was told, see `Asked`. `contexts` says over how many
    ranks SGLang shares them out, for layers in blocks; `files` is the digest of a searched model's.
    """

    fingerprint: str
    layers: tuple[int, ...]
    problem: str | None = None
    roles: str = ""
    indexers: tuple[IndexerSetting, ...] = ()
    shared_rows: Mapping[int, int] = field(default_factory=dict)
    shard: bool = False
    contexts: Mapping[int, int] = field(default_factory=dict)
    unions: bool = False
    files: str = ""


def disagreement(pattern: Pattern, reports: list[RankReport], place: str = "layer") -> str | None:
    """Return one line if a rank has a problem or another pattern, or a layer (`place`) is on no rank."""
    for rank, report in enumerate(reports):
        prefix = f"rank {rank}: " if len(reports) > 1 else ""
        if report.problem is not None:
            return prefix + report.problem
        if report.fingerprint != reports[0].fingerprint:
            return (
                f"rank {rank} serves a pattern with fingerprint {report.fingerprint[:16]}, rank 0 one with "
                f"{reports[0].fingerprint[:16]}; expected the same file on every node"
            )
        if report.shard != reports[0].shard:
            return f"rank {rank} and rank 0 don't both share out indexers; expected {SHARD_VARIABLE} on every node"
        if report.unions != reports[0].unions:
            return f"rank {rank} and rank 0 don't both attend over unions; expected {UNION_VARIABLE} on every node"
        if report.files != reports[0].files:
            return f"rank {rank} and rank 0 don't calibrate the same files of a model; expected the same on every node"
    missing = set(range(len(pattern))) - {layer for report in reports for layer in report.layers}
    if missing:
        return f"{place} {min(missing)} is on no rank, so its role can't be proven"
    return None


def read_back(reports: list[RankReport], selection: PatternSelection | None) -> Pattern:
    """Return the pattern that all ranks together run: for each layer the role that its first rank found."""
    roles = "".join(
        next(role for role in column if role != "-") for column in zip(*(r.roles for r in reports), strict=True)
    )
    found = {indexer.layer: indexer for report in reversed(reports) for indexer in report.indexers}
    return Pattern(roles, selection, tuple(found[layer] for layer in sorted(found)))


def barrier_all_ranks() -> None:
    """Wait for every rank to get here: a node that was started without the pattern never does.

    Then the process ends at once, with torch's words about the missing ranks: its process group would wait for them
    again while the interpreter ends.

    Raises:
        ProofError: if the time to wait is no number.
    """
    import torch.distributed
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return
    seconds = _meet_seconds()
    try:
        torch.distributed.monitored_barrier(group.cpu_group, timedelta(seconds=seconds), wait_all_ranks=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:120]
        refuse(
            f"not every rank serves a pattern after {seconds} s ({reason}); expected {PATTERN_VARIABLE} on every node",
            at_once=True,
        )


def _meet_seconds() -> int:
    text = os.environ.get(MEET_VARIABLE, "300")
    if not text.isdecimal() or int(text) == 0:
        raise ProofError(f"{MEET_VARIABLE} is {text!r}, expected a number of seconds")
    return int(text)


def first_problem(problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, on each rank."""
    problems = all_ranks(problem)
    found = next((rank for rank, line in enumerate(problems) if line is not None), None)
    if found is None:
        return None
    return f"rank {found}: {problems[found]}" if len(problems) > 1 else problems[found]


def all_ranks(value: Value) -> list[Value]:
    """Gather a value from each of the tensor and pipeline ranks, those of data-parallel attention among them."""
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    return group.all_gather_object(value) if group.world_size > 1 else [value]


def data_parallel_rank(scheduler: Any) -> int:
    """Return a scheduler's data-parallel rank, as requests are routed to it; 0 without any."""
    ranks = getattr(scheduler, "ps", scheduler)  # `ps` from 0.5.13 to 0.5.20
    if not hasattr(ranks, "dp_rank"):
        from sglang.srt.runtime_context import get_parallel  # 0.5.22 and newer

        ranks = get_parallel()
    return int(ranks.dp_rank or 0)
