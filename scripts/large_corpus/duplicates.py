"""Near-duplicates: how much of a document stands in earlier ones, by samples of its runs of words.

Words are letters and digits, in lower case, so that line breaks, punctuation and the marks of comments do not matter.
Every run of `WORDS` words has a hash; those divisible by `SAMPLED` are the document's fingerprints (Manber 1994,
"Finding similar files in a large file system"). Who has the same passage has the same fingerprints of it.
"""

from __future__ import annotations

import numpy as np

WORDS, SAMPLED = 8, 16
FEWEST = 3  # fingerprints by which a document is judged
_BYTES = 64  # of a word that count
_SPACE = 32
_TABLE = bytes(
    byte + 32 if 65 <= byte <= 90 else byte if byte > 127 or chr(byte).isalnum() else _SPACE for byte in range(256)
)
_rng = np.random.default_rng(8)
_VALUES = _rng.integers(1, 2**63, 256, dtype=np.uint64)
_VALUES[_SPACE] = 0
_POWERS = np.multiply.accumulate(np.full(_BYTES, 0x9E3779B97F4A7C15, np.uint64))
_PLACES = np.multiply.accumulate(np.full(WORDS, 0xD6E8FEB86659FD93, np.uint64))


def fingerprints(text: str) -> np.ndarray:
    """Return the sampled hashes of a text, `[n]` uint64, each once."""
    data = np.frombuffer(text.encode().translate(_TABLE), np.uint8)
    inside = data != _SPACE
    starts = np.flatnonzero(inside & ~np.concatenate([[False], inside[:-1]]))
    if starts.size < WORDS:
        return np.empty(0, np.uint64)
    lengths = np.diff(np.append(starts, data.size))
    place = np.arange(starts[0], data.size) - np.repeat(starts, lengths)
    values = _VALUES[data[starts[0] :]] * _POWERS[np.minimum(place, _BYTES - 1)]
    words = _mixed(np.add.reduceat(values, starts - starts[0]))
    runs = np.zeros(words.size - WORDS + 1, np.uint64)
    for number, factor in enumerate(_PLACES):
        runs += words[number : number + runs.size] * factor
    runs = _mixed(runs)
    return np.unique(runs[runs % np.uint64(SAMPLED) == 0])


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0x7FB5D329728EA185)
    return np.asarray(values ^ (values >> np.uint64(29)))


class Seen:
    """Fingerprints of the documents that were kept."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def share(self, found: np.ndarray) -> float:
        """Return the share of a document's fingerprints that earlier documents have; 0 where it has too few."""
        if found.size < FEWEST:
            return 0.0
        return sum(item in self._known for item in found.tolist()) / found.size

    def add(self, found: np.ndarray) -> None:
        """Keep the fingerprints of a document."""
        self._known.update(found.tolist())
