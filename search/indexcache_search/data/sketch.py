"""Recognise text seen before by a sample of hashes of its windows, which does not depend on where they stand.

Two texts that share a passage share the hashes of its windows, however they are cut into documents. The sample holds
the hashes below a limit, so both sides sample the same windows (Broder 1997, "On the resemblance and containment of
documents").
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

WINDOW = 16  # tokens
BITS = 40  # of a hash; among 512 windows, about one in 2 ** 31 collides
MOST = 1 << 22  # hashes of a growing sketch: one per 64 tokens of a corpus of 268 million
IN_A_FILE = 512
MOSTLY = 0.8  # share of a text's windows; a document shifted by a token shares all but one
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class Sketch:
    """Sample of the windows that were added: their hashes below a limit.

    Args:
        most: hashes to keep; the limit falls when there are more.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._limit = most, 1 << (BITS - 4)  # at first a window in sixteen
        self._hashes: set[int] = set()

    def add(self, tokens: NDArray[Any]) -> None:
        """Remember the windows of one text, `[tokens]`."""
        self._hashes |= self._sampled(tokens)
        while len(self._hashes) > self._most:
            self._limit //= 2
            self._hashes = {item for item in self._hashes if item < self._limit}

    def covers(self, tokens: NDArray[Any]) -> bool:
        """Return true if most sampled windows of a text were added before; related documents share fewer."""
        sampled = self._sampled(tokens)
        return bool(sampled) and len(sampled & self._hashes) >= MOSTLY * len(sampled)

    def _sampled(self, tokens: NDArray[Any]) -> set[int]:
        hashes = _hashes(tokens)
        return set(hashes[hashes < self._limit].tolist())

    @classmethod
    def of(cls, texts: Iterable[NDArray[Any]], count: int = IN_A_FILE) -> Self:
        """Build a sketch from the `count` lowest hashes of all windows of `texts`, or all if there are fewer."""
        every = np.concatenate([np.empty(0, np.uint64), *map(_hashes, texts)])
        return cls._lowest(set(np.unique(every)[:count].tolist()), count)

    @classmethod
    def _lowest(cls, hashes: set[int], count: int) -> Self:
        made = cls(count)
        made._hashes = hashes
        made._limit = max(hashes) + 1 if len(hashes) == count else 1 << BITS
        return made

    def encode(self) -> str:
        """Return the ascending hashes, five bytes each, as base64 for `decode`."""
        return base64.b64encode(b"".join(item.to_bytes(BITS // 8, "big") for item in sorted(self._hashes))).decode()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Rebuild a sketch from the text that `encode` returned.

        Raises:
            ValueError: if the text is not such a sketch.
        """
        content, size = base64.b64decode(text, validate=True), BITS // 8
        if len(content) % size:
            raise ValueError("found a part of a hash")
        hashes = {int.from_bytes(content[at : at + size], "big") for at in range(0, len(content), size)}
        return cls._lowest(hashes, IN_A_FILE)


class Seen:
    """Text that was used: the digests of its pieces, and a sketch of it, so that it is known however it is cut."""

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._sketch = Sketch()

    def __contains__(self, tokens: NDArray[Any]) -> bool:
        return _digest(tokens) in self._digests or self._sketch.covers(tokens)

    def add(self, tokens: NDArray[Any]) -> None:
        """Remember a piece of text."""
        self._digests.add(_digest(tokens))
        self._sketch.add(tokens)


def _digest(tokens: NDArray[Any]) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()


def _hashes(tokens: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a hash of `BITS` bits for each window of a text; none if the text is shorter than a window."""
    if len(tokens) < WINDOW:
        return np.empty(0, np.uint64)
    hashes = np.zeros(len(tokens) - WINDOW + 1, np.uint64)
    values = tokens.astype(np.uint64)
    for at in range(WINDOW):
        hashes = (hashes + values[at : at + len(hashes)] + np.uint64(1)) * _MULTIPLIER
        hashes ^= hashes >> np.uint64(29)
    return hashes >> np.uint64(64 - BITS)
