"""KL(baseline || pattern) over the whole vocabulary, computed in the engine; only sums leave it.

The baseline run keeps the hidden states that go into the LM head: hidden size x 2 bytes a token in bf16 (12 KB for
GLM-5) where its logits would be 300 times that. Later runs send kept and new states through the LM head side by side,
a chunk at a time: one more matrix product, no forward pass.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from sglang_indexcache.calibration.measure import UNMEASURED, Action, Measure
from sglang_indexcache.calibration.passes import RequestPart, parts
from sglang_indexcache.calibration.preflight import Calibration, CalibrationError
from sglang_indexcache.calibration.protocol import BASELINE, KEEP, KL, Measured, Range, busy, tag
from sglang_indexcache.sglang.probes import DIVERGENCE

if TYPE_CHECKING:
    from torch import Tensor

LIMIT_VARIABLE = "SGLANG_INDEXCACHE_KL_GB"
_Position = Annotated[int, Field(strict=True, ge=0, lt=1 << 40)]
_RANGES: TypeAdapter[list[tuple[int, int]]] = TypeAdapter(list[tuple[_Position, _Position]])
_BLOCK = 256  # rows whose distributions are held at once, in float32: 0.16 GB each for 155K tokens of vocabulary


class Rows:
    """One value for each position of a sequence, in the pieces that forward passes gave, in order."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Tensor]] = []

    def add(self, first: int, values: Tensor) -> None:
        """Add `[n, ...]` for positions from `first` on; a position that was there before starts the sequence afresh."""
        if self._pieces and first < self._pieces[-1][0] + len(self._pieces[-1][1]):
            self._pieces.clear()
        self._pieces.append((first, values))

    def take(self, first: int, last: int) -> list[Tensor] | None:
        """Return the pieces of `[first, last)`; `None` if a position is missing."""
        pieces, position = [], first
        for start, values in self._pieces:
            stop = start + len(values)
            if start <= position < min(stop, last):
                pieces.append(values[position - start : last - start])
                position = min(stop, last)
        return pieces if position >= last else None


class Divergence(Measure):
    """The measurement of divergences: hooks around SGLang's logits, and their results.

    Args:
        limit_gb: host memory of one rank for hidden states of the baseline.
    """

    name, feature = KL, DIVERGENCE
    refusal = f"kl is not measured {UNMEASURED}; expected --objective nll"

    def __init__(self, limit_gb: float) -> None:
        self.keeping = True  # while the baseline's pattern runs
        self._limit_gb = limit_gb
        self._data, self._ranges = "", tuple[Range, ...]()
        self._kept: dict[int, Rows] = {}
        self._found: dict[str, Rows] = {}
        self._parts: tuple[RequestPart, ...] = ()

    def actions(self) -> dict[str, Action]:
        """See `Measure.actions`."""
        return {BASELINE: self._announce, KL: self._sums}

    def _announce(self, calibration: Calibration, runner: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        row_bytes = runner.model_config.hidden_size * runner.dtype.itemsize
        return {"missing": self.announce(str(body.get("data")), _ranges(body.get("ranges")), row_bytes)}

    def _sums(self, calibration: Calibration, runner: Any, body: Mapping[str, Any]) -> dict[str, Any]:
        requests = body.get("requests")
        if not isinstance(requests, Mapping):
            raise CalibrationError("requests is missing, expected ranges of positions for each request id")
        return {"sums": self.sums({str(rid): _ranges(ranges) for rid, ranges in requests.items()})}

    def announce(self, data: str, ranges: Sequence[Range], row_bytes: int) -> list[int]:
        """Make room for a data set, forgetting any other.

        Args:
            data: its digest.
            ranges: for each sequence, the positions whose next token is scored.
            row_bytes: bytes of one hidden state.

        Returns:
            Sequences whose baseline is missing.

        Raises:
            CalibrationError: if it would take more memory than allowed.
        """
        needed = sum(last - first for first, last in ranges) * row_bytes / 1e9
        if needed > self._limit_gb:
            raise CalibrationError(
                f"the baseline's hidden states take {needed:.1f} GB of host memory on each rank, allowed are"
                f" {self._limit_gb:g}; expected fewer or shorter sequences, or {LIMIT_VARIABLE}={math.ceil(needed)}"
            )
        if (data, tuple(ranges)) != (self._data, self._ranges):
            self._kept.clear()
            self._data, self._ranges = data, tuple(ranges)
        return [number for number in range(len(ranges)) if self._baseline(number) is None]

    def sums(self, requests: Mapping[str, Sequence[Range]]) -> dict[str, tuple[float | None, float | None, int]]:
        """Return sum, sum of squares and count of the divergence over positions, for requests by id; forget them.

        A value that is not finite is `None`, since JSON has no number for it.

        Raises:
            CalibrationError: if a position was not measured, or another data set was announced since.
        """
        import torch

        answer = {}
        for rid, ranges in requests.items():
            measured = Measured.parse(rid)
            if measured is not None and measured.data != tag(self._data):
                raise CalibrationError(busy("another data set was announced meanwhile; expected to run it again"))
            rows, values = self._found.pop(rid, Rows()), []
            for first, last in ranges:
                states = rows.take(first, last)
                if states is None:
                    raise CalibrationError(f"no divergence for {rid}: it was not run, or without a baseline")
                values += states
            every = torch.cat(values).double() if values else torch.zeros(0, dtype=torch.float64)
            answer[rid] = (_or_none(every.sum().item()), _or_none(every.square().sum().item()), len(every))
        return answer

    def switched(self, is_baseline: bool) -> None:
        """Note that another pattern runs now, and forget results that nobody requested."""
        self.keeping = is_baseline
        self._found.clear()

    def begin_pass(self, metadata: Any) -> None:
        """Note the requests of a pass; `LogitsProcessor.forward` is the last function that knows them.

        Args:
            metadata: a `ForwardBatch`, or another object that SGLang hands over there, which has no requests.
        """
        self._parts = tuple(parts(metadata)) if hasattr(metadata, "rids") else ()

    def around_logprobs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Measure where hidden states become logits in chunks (around `InputLogprobProcessor.forward`)."""
        if not any(part.measured is not None and part.measured.what in (KEEP, KL) for part in self._parts):
            return original(*args, **kwargs)
        bound = inspect.signature(original).bind(*args, **kwargs)
        states, get_logits = bound.arguments["pruned_states"], bound.arguments["get_logits_fn"]
        if len(states) != sum(part.scored for part in self._parts):
            return original(*args, **kwargs)  # nothing is measured then, and a request for the sums says so
        self._keep(states)
        bound.arguments["get_logits_fn"] = self._measuring(get_logits)
        return original(*bound.args, **bound.kwargs)

    def _keep(self, states: Tensor) -> None:
        row = 0
        for part in self._parts:
            number = self._sequence(part, KEEP)
            if number is not None and self.keeping:
                first = part.first + part.tokens - part.scored
                start, stop = self._overlap(number, first, first + part.scored)
                if start < stop:
                    kept = _to_host(states[row + start - first : row + stop - first])
                    self._kept.setdefault(number, Rows()).add(start, kept)
            row += part.scored

    def _measuring(self, get_logits: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap `get_logits`, which SGLang calls for all rows in chunks, so that it measures on the way."""
        import torch

        done = 0

        def measured(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal done
            begin, done = done, done + len(states)
            logits = get_logits(states, *args, **kwargs)
            row = 0
            for part in self._parts:
                number = self._sequence(part, KL)
                if part.measured is not None and number is not None:
                    shift = part.first + part.tokens - part.scored - row  # from row to position
                    rows = max(row, begin), min(row + part.scored, done)
                    start, stop = self._overlap(number, rows[0] + shift, rows[1] + shift)
                    kept = self._kept.get(number, Rows()).take(start, stop)
                    if kept:
                        truth = torch.cat([piece.to(states.device, non_blocking=True) for piece in kept])
                        own = logits[start - shift - begin : stop - shift - begin]
                        expected = get_logits(truth, *args, **{**kwargs, "use_logits_buffer": False})
                        self._found.setdefault(part.measured.rid, Rows()).add(start, kl_rows(expected, own))
                row += part.scored
            return logits

        return measured

    def _sequence(self, part: RequestPart, what: str) -> int | None:
        """Return the number of a request's sequence if `what` is measured on it, and it is of the announced data."""
        measured = part.measured
        if measured is None or (measured.what, measured.data) != (what, tag(self._data)):
            return None
        return measured.sequence

    def _overlap(self, sequence: int, first: int, last: int) -> Range:
        """Return the announced part of `[first, last)` of a sequence; empty if it was not announced."""
        if sequence >= len(self._ranges):
            return 0, 0
        start, stop = self._ranges[sequence]
        return max(first, start), min(last, stop)

    def _baseline(self, sequence: int) -> list[Tensor] | None:
        return self._kept[sequence].take(*self._ranges[sequence]) if sequence in self._kept else None


def _ranges(given: Any) -> list[tuple[int, int]]:
    """Read `[[first, last], ...]` from a request."""
    try:
        ranges = _RANGES.validate_python(given)
    except ValidationError:
        raise CalibrationError(f"ranges are {str(given)[:50]}, expected [first, last] pairs of integers") from None
    if any(not 0 <= first < last for first, last in ranges):
        raise CalibrationError("a range is empty, expected first < last")
    return ranges


def limit_gb() -> float:
    """Return the host memory that one rank may use, in GB, from the environment.

    Raises:
        CalibrationError: if that is no positive number.
    """
    text = os.environ.get(LIMIT_VARIABLE, "32")
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise CalibrationError(f"{LIMIT_VARIABLE} is {text!r}, expected a number of gigabytes")
    return limit


def kl_rows(expected: Tensor, logits: Tensor) -> Tensor:
    """Return KL(softmax(expected) || softmax(logits)) of each row, in float32.

    Args:
        expected: `[rows, vocabulary]`.
        logits: `[rows, vocabulary]`.

    Returns:
        `[rows]` float32, in nats.
    """
    import torch

    divergences = []
    for start in range(0, len(logits), _BLOCK):
        rows = slice(start, start + _BLOCK)
        truth, own = expected[rows].float().log_softmax(-1), logits[rows].float().log_softmax(-1)
        divergences.append((truth.exp() * (truth - own)).sum(-1))
    return torch.cat(divergences)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _to_host(states: Tensor) -> Tensor:
    import torch

    host = torch.empty(states.shape, dtype=states.dtype, pin_memory=states.is_cuda)
    return host.copy_(states, non_blocking=True)  # copied back on the same stream
