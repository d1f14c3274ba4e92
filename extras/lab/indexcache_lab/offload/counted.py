"""Misses of a device buffer, counted by a calibration server."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from indexcache_lab.offload.selections import MISSES, RECORD
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.answers import Rank
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.calibration.protocol import Measured
from sglang_indexcache.io.fields import Count


class Counted(Rank):
    """Answer of a rank that counted.

    Attributes:
        misses: tokens that buffers would miss, by selecting layer, one count per buffer size.
    """

    misses: dict[Count, list[Count]] = Field(default_factory=dict)


def record_selections(server: CalibrationServer, first: int, tokens: int) -> None:
    """Start recording selections from position `first` on, in a marked request of `tokens` tokens."""
    server.control(RECORD, Rank, first=first, tokens=tokens)


def misses(server: CalibrationServer, layers: Sequence[int], sizes: Sequence[int], most: int) -> dict[int, list[int]]:
    """Stop recording; return the tokens that SGLang's HiSparse would load, by layer and buffer size.

    Args:
        server: records.
        layers: the selecting layers.
        sizes: buffer sizes in tokens.
        most: tokens that a layer selects in all steps, an upper bound of misses.

    Raises:
        ServerLostError: if the server does not answer, or was restarted.
        SearchError: if it refuses, or answers something that can't be.
    """
    ranks = server.control(MISSES, Counted, sizes=list(sizes))
    server.check_undisturbed(ranks)
    found = ranks[0].misses
    if sorted(found) != sorted(layers) or any(len(counts) != len(sizes) for counts in found.values()):
        raise SearchError(f"{server.url}: counted layers {sorted(found)}, expected {sorted(layers)}")
    worst = max((count for counts in found.values() for count in counts), default=0)
    if worst > most:
        raise SearchError(f"{server.url}: counted {worst} misses of a layer, which selects {most} tokens in all")
    return found


def misses_on(
    engine: SglangEngine, pattern: Pattern, data: TokenSet, row: int, *, steps: int, sizes: Sequence[int]
) -> dict[int, list[int]]:
    """Count the tokens that SGLang's HiSparse would load while decoding the last `steps` tokens of a sequence.

    Returns:
        By selecting layer, the tokens of all steps for each buffer size in `sizes`.

    Raises:
        SearchError: if the servers can't record selections, or none came back within the engine's patience.
    """

    def count(lane: CalibrationServer) -> dict[int, list[int]]:
        if MISSES not in engine.answers:
            raise SearchError(f"{lane.url}: does not record what is selected; expected another SGLang")
        lane.switch(pattern)
        record_selections(lane, data.seq_len - steps, data.seq_len)
        lane.logprobs([data.tokens[row].tolist()], data.seq_len - 1, [Measured.new(MISSES, row, data.sha256).rid])
        return misses(lane, pattern.full_layers, sizes, most=steps * min(engine.model.index_topk, data.seq_len))

    return engine.anywhere(count)
