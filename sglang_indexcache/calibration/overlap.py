"""Common indices of the layers, on a few sampled queries: a stand-in for SGLang's top-k capturer counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_indexcache.calibration.measure import UNMEASURED, Action, Measure
from sglang_indexcache.calibration.passes import Capturer, parts, register
from sglang_indexcache.calibration.preflight import Calibration, CalibrationError
from sglang_indexcache.calibration.protocol import OVERLAP, SAMPLE
from sglang_indexcache.serving.proof import current_roles
from sglang_indexcache.sglang.probes import SAMPLING

if TYPE_CHECKING:
    from torch import Tensor


class Overlap(Capturer, Measure):
    """A counter of common indices of all pairs of layers; registered with SGLang only while sampling.

    Memory: queries x layers x top-k x 4 bytes for the indices of one forward pass (41 MB for 64 queries of 78 layers
    with 2048), four times that while they are compared. Nothing grows with the context.
    """

    name, feature, refusal = OVERLAP, SAMPLING, f"index overlap is not measured {UNMEASURED}"

    def __init__(self) -> None:
        self._start(frozenset(), 0)

    def _start(self, positions: frozenset[int], layers: int) -> None:
        self._positions, self._layers = positions, layers
        self._rows: Tensor | None = None
        self._sets: list[Tensor] = []
        self._total: Tensor | None = None
        self._queries = 0

    def actions(self) -> dict[str, Action]:
        """See `Measure.actions`."""
        return {SAMPLE: self._sample, OVERLAP: lambda calibration, runner, body: self.end()}

    def fits(self, calibration: Calibration) -> bool:
        """See `Measure.fits`."""
        return calibration.family.sglang.shows_indices

    def _sample(self, calibration: Calibration, runner: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        positions = body.get("positions")
        if not isinstance(positions, list) or not all(type(position) is int for position in positions):
            raise CalibrationError("positions is missing, expected a list of positions")
        self.begin(positions, len(current_roles(calibration.family.sglang, runner.model)))
        return {}

    def begin(self, positions: Sequence[int], layers: int) -> None:
        """Start sampling the queries at `positions` of requests whose id says `overlap`."""
        self._start(frozenset(positions), layers)
        register(self)

    def end(self) -> dict[str, Any]:
        """Stop sampling.

        Returns:
            `overlap`, `[layers][layers]`, the mean share of indices in common, and `queries`.

        Raises:
            CalibrationError: if nothing was sampled.
        """
        register(None)
        if self._total is None or not self._queries:
            raise CalibrationError("no query was sampled: no request asked for it, or none saw more than top-k tokens")
        return {"overlap": (self._total.cpu() / self._queries).tolist(), "queries": self._queries}

    def before_forward(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Find the rows of this pass that are sampled (before `ModelRunner.forward`)."""
        if not self._positions:
            return
        import torch

        self._sets.clear()
        rows = [
            part.row + position - part.first
            for part in parts(forward_batch)
            if part.measured is not None and part.measured.what == OVERLAP
            for position in range(part.first, part.first + part.tokens)
            if position in self._positions
        ]
        self._rows = torch.tensor(rows, device=runner.device) if rows else None

    def capture(self, layer_id: int, topk_indices: Tensor) -> None:
        """See `Capturer.capture`."""
        if self._rows is None:
            return
        self._sets.append(topk_indices[self._rows].sort(-1).values)
        if len(self._sets) == self._layers:
            self._count()

    def _count(self) -> None:
        import torch

        shares = common_indices(torch.stack(self._sets)).double().sum(0) / self._sets[0].shape[-1]
        self._total = shares if self._total is None else self._total + shares
        self._queries += len(self._sets[0])
        self._sets.clear()
        self._rows = None


def common_indices(sets: Tensor) -> Tensor:
    """Count the common indices of all pairs of layers.

    Args:
        sets: `[layers, queries, k]` sorted indices; -1 is none, and common to nobody.

    Returns:
        `[queries, layers, layers]` int64.
    """
    import torch

    layers, queries, size = sets.shape
    common = torch.zeros(queries, layers, layers, dtype=torch.int64, device=sets.device)
    for layer in range(layers):
        others = sets[layer:].transpose(0, 1).reshape(queries, -1).contiguous()
        own = sets[layer].contiguous()
        places = torch.searchsorted(own, others).clamp_(max=size - 1)
        equal = (own.gather(1, places) == others) & (others >= 0)
        counts = equal.view(queries, layers - layer, size).sum(-1)
        common[:, layer, layer:] = counts
        common[:, layer:, layer] = counts
    return common
