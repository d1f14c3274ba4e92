"""Add up the times of a pattern's layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_indexcache import Pattern


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Latencies of layers at one context, in milliseconds, by a latency table.

    An `S` layer attends to what its `F` layer selected, and queries that share a selection attend together. So it costs
    less behind a layer that selects in blocks.

    Attributes:
        table: name of the table that they are of.
        words: what it was measured on, and that the model is not that where it is not.
        context: tokens of a prompt.
        full: an `F` layer of a prompt, by the number of queries for which it selects at a time.
        shared: an `S` layer behind such a selection.
        rest: what a prompt takes beside its layers.
        decode_full: an `F` layer in a decoding step.
        decode_shared: an `S` layer there.
        unlike: in what the model is of another shape; empty if in nothing.
        whole: whether experts, and what ranks send each other, are in them.
    """

    table: str
    words: str
    context: int
    full: Mapping[int, float]
    shared: Mapping[int, float]
    rest: float
    decode_full: float
    decode_shared: float
    unlike: str = ""
    whole: bool = False

    @property
    def has_blocks(self) -> bool:
        """Whether the table has times of blocks of queries."""
        return len(self.full) > 1

    def group(self, queries: int, followers: int) -> float:
        """Return the time of an `F` layer that selects for `queries`, with the `S` layers that follow it."""
        return self.full[queries] + followers * self.shared[queries]

    def prompt_ms(self, pattern: Pattern) -> float:
        """Return the prefill time."""
        size = Counter(pattern.source_layers)
        return self.rest + sum(self.group(queries, size[layer] - 1) for layer, queries in pattern.queries.items())

    def decode_ms(self, pattern: Pattern) -> float:
        """Return the time of a decoding step."""
        return len(pattern.full_layers) * self.decode_full + len(pattern.shared_layers) * self.decode_shared

    def prompt_share(self, pattern: Pattern, native: Pattern) -> float:
        """Return the prefill time relative to that of the checkpoint's own pattern."""
        return self.prompt_ms(pattern) / self.prompt_ms(native)

    def decode_share(self, pattern: Pattern, native: Pattern) -> float:
        """Return the time of a decoding step relative to that of the checkpoint's own pattern."""
        return self.decode_ms(pattern) / self.decode_ms(native)
