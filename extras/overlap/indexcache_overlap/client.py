"""Index overlap of the layers, as a search asks servers for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from indexcache_overlap.measure import OVERLAP, SAMPLE
from indexcache_search.data.tokens import TokenSet, sampled_queries
from indexcache_search.engines.answers import Rank
from indexcache_search.engines.calibration_client import CalibrationServer
from indexcache_search.engines.sglang import ServerMatrix
from indexcache_search.errors import SearchError
from sglang_indexcache import ModelLayers
from sglang_indexcache.calibration.protocol import Measured
from sglang_indexcache.io.fields import Count, Finite

_ROUNDING = 1e-6  # tolerance for means of counts


class Sampled(Rank):
    """Answer of a rank that sampled queries."""

    overlap: list[list[Finite]] = Field(default_factory=list)
    queries: Count = 0


class Overlap(ServerMatrix):
    """The mean overlap of each two layers under the checkpoint's own pattern."""

    def on(self, lane: CalibrationServer, model: ModelLayers, data: TokenSet, rows: int) -> NDArray[np.float64]:
        """See `ServerMatrix.on`."""
        positions = sampled_queries(data.seq_len, model.first_sparse_position, rows)
        lane.switch(model.native)
        lane.control(SAMPLE, Rank, positions=positions.tolist())
        for row in range(data.num_sequences):
            lane.logprobs([data.tokens[row].tolist()], data.seq_len - 1, [Measured.new(OVERLAP, row, data.sha256).rid])
        overlap, queries = index_overlap(lane, model.num_layers)
        if queries != len(positions) * data.num_sequences:
            raise SearchError(f"{lane.url}: sampled {queries} queries, expected {len(positions) * data.num_sequences}")
        return np.asarray(overlap)


OVERLAPS = Overlap()


def index_overlap(lane: CalibrationServer, layers: int) -> tuple[list[list[float]], int]:
    """Stop sampling; return the mean overlap of each two of `layers` layers, and the number of sampled queries.

    Raises:
        ServerLostError: if the server does not answer, or was restarted.
        SearchError: if it refuses, or answers something that can't be.
    """
    ranks = lane.control(OVERLAP, Sampled)
    lane.check_undisturbed(ranks)
    answer = ranks[0]
    if len(answer.overlap) != layers or {len(row) for row in answer.overlap} != {layers}:
        raise SearchError(f"{lane.url}: gave no overlap of all {layers} layers")
    found = np.asarray(answer.overlap)
    beyond = max(-found.min(), found.max() - 1.0, np.abs(found - found.T).max(), np.abs(found.diagonal() - 1).max())
    if beyond > _ROUNDING:
        raise SearchError(f"{lane.url}: gave an overlap that is none: expected 0 to 1, symmetric, 1 of a layer's own")
    return answer.overlap, answer.queries
