"""The parts of requests in a forward pass, and a stand-in for the object that SGLang shows what they select."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_indexcache.calibration.protocol import Measured

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RequestPart:
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


def parts(forward_batch: Any) -> Iterator[RequestPart]:
    """Yield the requests of a prefill pass in order (`ForwardBatch` of SGLang); none of a decode or idle pass."""
    if not forward_batch.forward_mode.is_extend() or forward_batch.rids is None:
        return
    row = 0
    lengths = forward_batch.extend_seq_lens_cpu
    starts = forward_batch.extend_logprob_start_lens_cpu or lengths
    for rid, first, tokens, start in zip(
        forward_batch.rids, forward_batch.extend_prefix_lens_cpu, lengths, starts, strict=True
    ):
        yield RequestPart(Measured.parse(str(rid)), row, int(first), int(tokens), max(int(tokens) - int(start), 1))
        row += int(tokens)


class Capturer:
    """A stand-in for SGLang's top-k capturer; registered with SGLang only while there is something to capture."""

    def capture(self, layer_id: int, topk_indices: Tensor) -> None:
        """Take the selections `[tokens, k]` of a layer; SGLang calls this for all layers in order, S layers too."""
        raise NotImplementedError

    def on_forward_end(self, *args: Any, **kwargs: Any) -> None:
        """Return nothing to go with a pass; SGLang calls this."""

    def get_topk(self, *args: Any, **kwargs: Any) -> None:
        """Return nothing to go with a request; SGLang calls this."""


def register(capturer: Capturer | None) -> None:
    """Make SGLang call `capturer` from now on; `None` for nobody."""
    from sglang.srt.state_capturer.indexer_topk import set_global_indexer_capturer

    set_global_indexer_capturer(capturer)
