"""All ranks of a server, on all its nodes, serve one pattern, or none does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.plugin import PATTERN_VARIABLE

MEET_VARIABLE = "SGLANG_INDEXCACHE_MEET_SECONDS"


class ProofError(IndexCacheError):
    """A loaded model, or a set of ranks, that would not run the pattern."""


@dataclass(frozen=True)
class RankReport:
    """What one rank found."""

    fingerprint: str
    layers: tuple[int, ...]
    problem: str | None


def disagreement(pattern: Pattern, reports: list[RankReport]) -> str | None:
    """One line if a rank has a problem, another pattern, or a layer is on no rank."""
    for rank, report in enumerate(reports):
        prefix = f"rank {rank}: " if len(reports) > 1 else ""
        if report.problem is not None:
            return prefix + report.problem
        if report.fingerprint != reports[0].fingerprint:
            return (
                f"rank {rank} serves a pattern with fingerprint {report.fingerprint[:16]}, rank 0 one with "
                f"{reports[0].fingerprint[:16]}; expected the same file on every node"
            )
    missing = set(range(len(pattern))) - {layer for report in reports for layer in report.layers}
    if missing:
        return f"layer {min(missing)} is on no rank, so its role can't be proven"
    return None


def meet_all_ranks() -> None:
    """Wait for every rank to get here: a node that was started without the pattern never does.

    Raises:
        ProofError: with what torch says of the ranks that did not come.
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
        raise ProofError(
            f"not every rank serves a pattern after {seconds} s ({reason}); expected {PATTERN_VARIABLE} on every node"
        ) from None


def _meet_seconds() -> int:
    text = os.environ.get(MEET_VARIABLE, "300")
    if not text.isdecimal() or int(text) == 0:
        raise ProofError(f"{MEET_VARIABLE} is {text!r}, expected a number of seconds")
    return int(text)


def all_ranks(report: RankReport) -> list[RankReport]:
    """The reports of all tensor and pipeline ranks, those of data-parallel attention among them."""
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    return group.all_gather_object(report) if group.world_size > 1 else [report]
