"""Selections of the last queries of a request, and what a buffer on the device would miss if they were decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_indexcache.calibration.measure import UNMEASURED, Action, Measure
from sglang_indexcache.calibration.passes import Capturer, parts, register
from sglang_indexcache.calibration.preflight import Calibration, CalibrationError
from sglang_indexcache.families.dsa import DSA
from sglang_indexcache.families.dsa.needs import TRANSFORM
from sglang_indexcache.sglang.probes import SAMPLING, Feature, Need

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


RECORD, MISSES = "record", "misses"
_BACKEND = Need("srt.model_executor.forward_context", "get_attn_backend")
_INDEXER_METADATA = Need(
    "srt.layers.attention.dsa_backend", "DeepseekSparseAttnBackend.get_indexer_metadata", ("layer_id", "forward_batch")
)
_OFFSETS = Need("srt.layers.attention.dsa_backend", "DSAMetadata.topk_indices_offset")
_SLOTS = Need("srt.layers.attention.dsa_backend", "DSAMetadata.page_table_1")
CAPTURE = Feature(
    "misses",
    "what queries of DSA models select, counted on a calibration server",
    (*SAMPLING.needs, _BACKEND, _INDEXER_METADATA, TRANSFORM, _OFFSETS, _SLOTS),
    "no indexcache-offload --endpoint",
)


class Selections(Capturer, Measure):
    """A recorder of selections of one request after the other; registered with SGLang only while it records.

    In a causal pass every query selects from the tokens before it, so the last queries of a prompt select what decoding
    their tokens would. The selections stay here, and only counts leave, since they are large: queries x layers x top-k
    x 4 bytes of host memory (82 MB for 128 queries of 78 layers with 2048).
    """

    name, feature = MISSES, CAPTURE
    refusal = f"selections are not recorded of this model, {UNMEASURED}"

    def __init__(self) -> None:
        self._start(0, 0, "")

    def _start(self, first: int, tokens: int, roles: str) -> None:
        self._first, self._tokens, self._roles = first, tokens, roles
        self._batch: Any = None
        self._rows: Tensor | None = None
        self._requests: Tensor | None = None
        self._found: dict[int, list[NDArray[np.int32]]] = {}
        self._rids: set[str] = set()

    def fits(self, calibration: Calibration) -> bool:
        """See `Measure.fits`; positions were compared with transformers' on DSA models alone."""
        return calibration.family is DSA

    def actions(self) -> dict[str, Action]:
        """See `Measure.actions`."""
        return {RECORD: self._record, MISSES: self._end}

    def _record(self, calibration: Calibration, runner: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        first, tokens = (number if type(number) is int else 0 for number in (body.get("first"), body.get("tokens")))
        self.begin(first, tokens, calibration.family.sglang.configured(runner))
        return {}

    def _end(self, calibration: Calibration, runner: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        sizes = body.get("sizes")
        if not isinstance(sizes, list) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise CalibrationError("sizes is missing, expected a list of tokens")
        return self.end(sizes)

    def begin(self, first: int, tokens: int, roles: str) -> None:
        """Record what queries select from position `first` on, of a request of `tokens` whose id says `misses`.

        Args:
            first: at least 1.
            tokens: length of the request.
            roles: a letter a layer; only `F` layers are recorded, since the selections of others follow from theirs.

        Raises:
            CalibrationError: if there is no such query.
        """
        if not 0 < first < tokens:
            raise CalibrationError(f"first is {first} and tokens {tokens}, expected 0 < first < tokens")
        self._start(first, tokens, roles)
        register(self)

    def end(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Stop recording, and count misses.

        Returns:
            `misses`: by `F` layer, for each of `sizes`, the tokens that SGLang's HiSparse would bring with a buffer of
            that size, all steps together.

        Raises:
            IndexCacheError: if not every query was recorded once, or a buffer can't hold what it selects.
        """
        register(None)
        import numpy as np  # SGLang brings it, as does the module below

        from indexcache_lab.offload.lru_buffer import hisparse_misses

        found, rids, first, steps = self._found, self._rids, self._first, self._tokens - self._first
        recorded = {layer: sum(map(len, chunks)) for layer, chunks in found.items()}
        expected = [layer for layer, role in enumerate(self._roles) if role == "F"]
        self._start(0, 0, "")
        if len(rids) != 1 or sorted(recorded) != expected or set(recorded.values()) != {steps}:
            raise CalibrationError(
                f"recorded others than {steps} queries of one request that asks for it in each F layer"
            )
        misses = {}
        for layer in expected:
            rows = np.concatenate(found[layer])
            numbered = [(row, first + number + 1) for number, row in enumerate(rows)]
            misses[str(layer)] = [sum(hisparse_misses(numbered, size, first)) for size in sizes]
        return {"misses": misses}

    def before_forward(self, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Find the rows of this pass that are recorded (before `ModelRunner.forward`)."""
        if not self._tokens:
            return
        import torch

        rows: list[int] = []
        requests: list[int] = []
        for number, part in enumerate(parts(forward_batch)):
            if part.measured is None or part.measured.what != MISSES:
                continue
            begin = max(part.first, self._first)
            rows += range(part.row + begin - part.first, part.row + part.tokens)
            requests += [number] * max(0, part.first + part.tokens - begin)
            self._rids.add(part.measured.rid)
        self._batch, self._rows = forward_batch, None
        if rows:
            self._rows, self._requests = (torch.tensor(item, device=runner.device) for item in (rows, requests))

    def capture(self, layer_id: int, topk_indices: Tensor) -> None:
        """See `Capturer.capture`."""
        if self._rows is None or self._roles[layer_id] != "F":
            return
        assert self._requests is not None
        from sglang.srt.model_executor.forward_context import get_attn_backend

        from indexcache_lab.offload.positions import positions_of

        chosen = topk_indices[self._rows]
        metadata = get_attn_backend().get_indexer_metadata(layer_id, self._batch)
        positions = positions_of(metadata, chosen, self._rows, self._requests)
        self._found.setdefault(layer_id, []).append(positions.cpu().numpy())
