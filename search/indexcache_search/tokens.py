"""Token sequences ready to be evaluated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Sequences of equal length and which of their tokens count.

    Attributes:
        tokens: `[sequences, seq_len]` int32.
        scored: `[sequences, seq_len]` bool; token t counts as a target, predicted from the tokens before it.
        source_of: `[sequences]` int; index into `sources`.
        sources: names of where the sequences came from.
    """

    tokens: NDArray[np.int32]
    scored: NDArray[np.bool_]
    source_of: NDArray[np.int64]
    sources: tuple[str, ...]

    @property
    def num_sequences(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def seq_len(self) -> int:
        return int(self.tokens.shape[1])

    @cached_property
    def scored_tokens(self) -> int:
        """Scored tokens of all sequences."""
        return int(self.scored.sum())

    @cached_property
    def sha256(self) -> str:
        """Digest of shape, tokens (int32, little-endian), scored flags and the sequences' sources, in hex."""
        digest = hashlib.sha256(repr(self.tokens.shape).encode())
        digest.update(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes())
        digest.update(np.packbits(self.scored).tobytes())
        digest.update(np.ascontiguousarray(self.source_of, dtype="<i4").tobytes())
        return digest.hexdigest()


def sampled_queries(seq_len: int, index_topk: int, rows: int) -> NDArray[np.int64]:
    """Positions of up to `rows` queries, evenly spread over those that see more than `index_topk` tokens."""
    number = min(rows, seq_len - index_topk)
    return np.linspace(index_topk, seq_len - 1, number).round().astype(np.int64)
