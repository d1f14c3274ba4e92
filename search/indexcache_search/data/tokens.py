"""Token sequences for evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from indexcache_search.errors import DataError


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Sequences of equal length, with a mask of the tokens that count.

    Attributes:
        tokens: `[sequences, seq_len]` int32.
        scored: `[sequences, seq_len]` bool; token t counts as a target, predicted from the tokens before it.
        source_of: `[sequences]` int; index into `sources`.
        sources: names of where the sequences came from.
        prompt: `[sequences, seq_len]` bool; tokens that a model reads at once, before it writes others; `None` where
            that makes no difference.
        starts: `[sequences, seq_len]` int32; where in the sequence a token's document begins, before which the token
            sees nothing; `None` where tokens see all earlier ones.
    """

    tokens: NDArray[np.int32]
    scored: NDArray[np.bool_]
    source_of: NDArray[np.int64]
    sources: tuple[str, ...]
    prompt: NDArray[np.bool_] | None = None
    starts: NDArray[np.int32] | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return int(self.tokens.shape[0])

    @property
    def seq_len(self) -> int:
        """Tokens per sequence."""
        return int(self.tokens.shape[1])

    @cached_property
    def scored_tokens(self) -> int:
        """Number of scored tokens in all sequences."""
        return int(self.scored.sum())

    @cached_property
    def copy_of(self) -> NDArray[np.int64]:
        """`[sequences]`; sequences of the same tokens have the same number."""
        numbers: dict[bytes, int] = {}
        return np.asarray([numbers.setdefault(row.tobytes(), len(numbers)) for row in self.tokens], np.int64)

    def taken(self, rows: Sequence[int]) -> TokenSet:
        """Return the sequences `rows` of this set, in that order."""
        chosen = list(rows)
        prompt = None if self.prompt is None else self.prompt[chosen]
        starts = None if self.starts is None else self.starts[chosen]
        return TokenSet(self.tokens[chosen], self.scored[chosen], self.source_of[chosen], self.sources, prompt, starts)

    def ending_in_replies(self, reply: int) -> TokenSet:
        """Return prompts whose last `reply` tokens are decoded one by one and alone count.

        Raises:
            DataError: if no prompt remains, a source has no token that counts, or prompts are already set.
        """
        if self.prompt is not None:
            raise DataError("--reply is for models with indexers; of a dense model's data the replies count anyway")
        if reply >= self.seq_len:
            raise DataError(f"--reply is {reply}, expected fewer than the {self.seq_len} tokens of a sequence")
        position = np.arange(self.seq_len)
        scored = self.scored & (position > self.seq_len - reply)
        for number, source in enumerate(self.sources):
            if not scored[self.source_of == number].any():
                raise DataError(f"{source}: none of its last {reply} tokens count, expected a larger --reply")
        prompt = np.broadcast_to(position < self.seq_len - reply, self.tokens.shape).copy()
        return TokenSet(self.tokens, scored, self.source_of, self.sources, prompt, self.starts)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the shape, tokens (int32, little-endian), flags and sources of the sequences."""
        digest = hashlib.sha256(repr(self.tokens.shape).encode())
        digest.update(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes())
        digest.update(np.packbits(self.scored).tobytes())
        digest.update(np.ascontiguousarray(self.source_of, dtype="<i4").tobytes())
        if self.prompt is not None:
            digest.update(np.packbits(self.prompt).tobytes())
        if self.starts is not None:
            digest.update(np.ascontiguousarray(self.starts, dtype="<i4").tobytes())
        return digest.hexdigest()


def default_reply(seq_len: int) -> int:
    """Return the tokens that count at the end of a sequence where layers select for blocks of prompt queries."""
    return max(2, seq_len // 4)


def sampled_queries(seq_len: int, first_sparse_position: int, rows: int) -> NDArray[np.int64]:
    """Return positions of up to `rows` queries, evenly spread over those past `first_sparse_position`."""
    number = min(rows, seq_len - first_sparse_position)
    return np.linspace(first_sparse_position, seq_len - 1, number).round().astype(np.int64)


def growing_shares(data: TokenSet, first: int) -> list[list[int]]:
    """Return rows in growing shares: each holds the one before and is about twice as large; the last holds all.

    Sources keep their proportions. The first share holds at least two sequences of each source, or all of them.

    Args:
        data: the set.
        first: minimum number of rows in the first share.
    """
    counts = np.bincount(data.source_of, minlength=len(data.sources))
    place = np.zeros(data.num_sequences)  # of a row among those of its source, from 0 to 1
    for source, count in enumerate(counts):
        place[data.source_of == source] = (np.arange(count) + 0.5) / count
    order: list[int] = np.lexsort((data.source_of, place)).tolist()
    size = first
    while any((data.source_of[order[:size]] == source).sum() < min(2, count) for source, count in enumerate(counts)):
        size += 1
    shares = []
    while size < len(order):
        shares.append(order[:size])
        size *= 2
    return [*shares, order]
