"""Requests that measure more than logprobs say so in their id, and where a forward pass has which part of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

KEEP, KL, OVERLAP = "keep", "kl", "overlap"
_PREFIX = "indexcache"


@dataclass(frozen=True)
class Measured:
    """What is measured on a request.

    Attributes:
        what: `keep` the baseline's hidden states, `kl` to them, or index `overlap`.
        sequence: number of the sequence in the data set that the control request announced.
        nonce: makes the id unique among all requests.
    """

    what: str
    sequence: int
    nonce: str

    @classmethod
    def new(cls, what: str, sequence: int) -> Measured:
        """One more request that measures `what`."""
        return cls(what, sequence, uuid4().hex)

    @property
    def rid(self) -> str:
        """The request id that says so."""
        return f"{_PREFIX}:{self.what}:{self.sequence}:{self.nonce}"

    @classmethod
    def parse(cls, rid: str) -> Measured | None:
        """What `rid` asks for; `None` for an ordinary request."""
        words = rid.split(":")
        if len(words) != 4 or words[0] != _PREFIX or words[1] not in (KEEP, KL, OVERLAP) or not words[2].isdecimal():
            return None
        return cls(words[1], int(words[2]), words[3])


@dataclass(frozen=True)
class Part:
    """The tokens of one request in one forward pass.

    Attributes:
        measured: what is measured on the request, if anything.
        row: of its first token among the tokens of the pass.
        first: position of that token in the request.
        tokens: how many there are.
        scored: tokens at its end for which SGLang computes logits, at least one.
    """

    measured: Measured | None
    row: int
    first: int
    tokens: int
    scored: int


def parts(forward_batch: Any) -> Iterator[Part]:
    """The requests of a prefill pass in order (`ForwardBatch` of SGLang); none of a decode or idle pass."""
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
