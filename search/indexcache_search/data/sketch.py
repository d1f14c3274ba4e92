"""Which text was seen before: a sample of hashes of its windows, chosen by the text itself and not by where it stands.

Two texts that share a passage share its windows' hashes, however they are cut into documents; the sample is the hashes
below a limit, so both sides sample the same windows (Broder 1997, "On the resemblance and containment of documents").
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

WINDOW = 16  # tokens
BITS = 40  # of a hash; a window in 2 ** 31 or so is taken for another one of 512
MOST = 1 << 22  # hashes of a sketch that grows: 64 tokens each for a corpus of 268 million
IN_A_FILE = 512
MOSTLY = 0.8  # of a text's windows; a document that begins a token later has all but one
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Sketch:
    """Hashes below `limit` of all windows that were added.

    Args:
        most: hashes to keep; with more the limit falls.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._limit = most, 1 << (BITS - 4)  # at first a window in sixteen
        self._hashes: set[int] = set()

    def add(self, tokens: NDArray[Any]) -> None:
        """Remember the windows of one text, `[tokens]`."""
        hashes = _hashes(tokens)
        self._hashes.update(hashes[hashes < self._limit].tolist())
        while len(self._hashes) > self._most:
            self._limit //= 2
            self._hashes = {item for item in self._hashes if item < self._limit}

    def covers(self, tokens: NDArray[Any]) -> bool:
        """Whether most of a text's sampled windows were added before; what documents of a kind share is less."""
        sampled = self._sampled(tokens)
        return bool(sampled) and len(sampled & self._hashes) >= MOSTLY * len(sampled)

    def common(self, tokens: NDArray[Any]) -> int:
        """Count the different windows of a text, `[tokens]`, that are in this sketch."""
        return len(self._sampled(tokens) & self._hashes)

    def _sampled(self, tokens: NDArray[Any]) -> set[int]:
        hashes = _hashes(tokens)
        return set(hashes[hashes < self._limit].tolist())

    @classmethod
    def of(cls, texts: Iterable[NDArray[Any]], count: int = IN_A_FILE) -> Self:
        """The sketch of `texts` with the `count` lowest hashes of all their windows, or all where there are fewer."""
        made = cls(count)
        every = [_hashes(text) for text in texts]
        lowest = np.unique(np.concatenate(every))[:count] if every else np.empty(0, np.uint64)
        made._hashes = set(lowest.tolist())
        made._limit = max(made._hashes) + 1 if len(made._hashes) == count else 1 << BITS
        return made

    def encode(self) -> str:
        """Base64 of the hashes, ascending, five bytes each; `decode` reads it."""
        return base64.b64encode(b"".join(item.to_bytes(BITS // 8, "big") for item in sorted(self._hashes))).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """What `of` and `encode` made.

        Raises:
            ValueError: if it is something else.
        """
        content, size = base64.b64decode(text, validate=True), BITS // 8
        if len(content) % size:
            raise ValueError("found a part of a hash")
        made = cls(IN_A_FILE)
        made._hashes = {int.from_bytes(content[at : at + size], "big") for at in range(0, len(content), size)}
        made._limit = max(made._hashes) + 1 if len(made._hashes) == IN_A_FILE else 1 << BITS
        return made


def _hashes(tokens: NDArray[Any]) -> NDArray[np.uint64]:
    """A hash of `BITS` bits for each window of a text; none of one that is shorter."""
    if len(tokens) < WINDOW:
        return np.empty(0, np.uint64)
    hashes = np.zeros(len(tokens) - WINDOW + 1, np.uint64)
    values = tokens.astype(np.uint64)
    for at in range(WINDOW):
        hashes = (hashes + values[at : at + len(hashes)] + np.uint64(1)) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes >> np.uint64(64 - BITS)
