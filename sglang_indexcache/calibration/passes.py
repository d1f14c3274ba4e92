"""The parts of requests in a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.calibration.protocol import Measured


@dataclass(frozen=True)
class Part:
    """The tokens of one request in one forward pass.

    Attributes:
        measured: what is measured on the request, if anything.
        row: index of its first token among the tokens of the pass.
        first: position of that token in the request.
        tokens: number of its tokens.
        scored: tokens at its end for which SGLang computes logits, at least one.
    """

    measured: Measured | None
    row: int
    first: int
    tokens: int
    scored: int


def parts(forward_batch: Any) -> Iterator[Part]:
    """Yield the requests of a prefill pass in order (`ForwardBatch` of SGLang); none of a decode or idle pass."""
    if not forward_batch.forward_mode.is_extend() or forward_batch.rids is None:
        return
    row = 0
    lengths = forward_batch.extend_seq_lens_cpu
    starts = forward_batch.extend_logprob_start_lens_cpu or lengths
    for rid, first, tokens, start in zip(
        forward_batch.rids, forward_batch.extend_prefix_lens_cpu, lengths, starts, strict=True
    ):
        yield Part(Measured.parse(str(rid)), row, int(first), int(tokens), max(int(tokens) - int(start), 1))
        row += int(tokens)
