"""What a search needs of an engine: evaluate patterns on tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from indexcache_search.tokens import TokenSet
from sglang_indexcache import DsaModel, Pattern

Objective = Literal["nll", "kl"]


@dataclass(frozen=True)
class Evaluation:
    """Sums over the scored tokens of each sequence, for one pattern.

    Attributes:
        pattern: what ran.
        losses: float64 sum per sequence: negative log-likelihood in nats (`nll`), or KL(baseline || pattern) over the
            whole vocabulary (`kl`).
        correct: tokens per sequence that greedy decoding would have got right.
        tokens: scored tokens per sequence.
        seconds: wall time.
    """

    pattern: Pattern
    losses: tuple[float, ...]
    correct: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: float


class Engine(Protocol):
    """Something that runs a DSA model with any pattern, switched without a restart.

    Attributes:
        name: engine and version: `transformers 5.23.0`.
        settings: what else a result depends on (torch, dtype, device, batch size); part of a search's identity.
        model: the model's layers, locked layers and digest.
    """

    name: str
    settings: Mapping[str, str]
    model: DsaModel

    def evaluate(self, patterns: Sequence[Pattern], data: TokenSet, objective: Objective) -> Iterator[Evaluation]:
        """Evaluate `patterns` on `data`; yield each as it is done, in any order."""
        ...

    def topk_overlap(self, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """Mean of |T_i & T_j| / k over `rows` sampled queries a sequence, `[layers, layers]` (paper, Appendix A).

        `None` if the engine can't measure it.
        """
        ...

    def output_similarity(self, data: TokenSet) -> NDArray[np.float64] | None:
        """Mean cosine of layer i's attention output with its own and with layer j's indices, `[i, j]`, j <= i.

        All layers below i run with the checkpoint's own pattern (paper, Appendix C). `None` if the engine can't measure
        it.
        """
        ...
