"""What a search needs of an engine: evaluate patterns on tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.objectives import Objective
from indexcache_search.plans import Plan
from sglang_indexcache import ModelLayers


@dataclass(frozen=True)
class Evaluation:
    """Sums over the scored tokens of each sequence, for one pattern.

    Attributes:
        pattern: what ran.
        rows: the sequences' rows in their token set.
        losses: float64 sum per sequence: negative log-likelihood in nats (`nll`), or KL(baseline || pattern) over the
            whole vocabulary (`kl`).
        correct: tokens per sequence that greedy decoding would have got right.
        tokens: scored tokens per sequence.
        layer_tokens: layers that really ran x tokens, per sequence: what the evaluation cost.
        seconds: wall time of all sequences.
    """

    pattern: Plan
    rows: tuple[int, ...]
    losses: tuple[float, ...]
    correct: tuple[int, ...]
    tokens: tuple[int, ...]
    layer_tokens: tuple[int, ...]
    seconds: float

    def on(self, rows: Sequence[int]) -> Evaluation:
        """The part of some sequences; it takes as large a part of the seconds.

        Raises:
            KeyError: if one was not evaluated.
        """
        index_of = {row: index for index, row in enumerate(self.rows)}
        at = [index_of[row] for row in rows]

        def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(values[index] for index in at)

        return Evaluation(
            self.pattern,
            tuple(rows),
            pick(self.losses),
            pick(self.correct),
            pick(self.tokens),
            pick(self.layer_tokens),
            self.seconds * len(at) / len(self.rows),
        )

    def __add__(self, other: Evaluation) -> Evaluation:
        """This evaluation and one of other sequences under the same pattern."""
        return Evaluation(
            self.pattern,
            self.rows + other.rows,
            self.losses + other.losses,
            self.correct + other.correct,
            self.tokens + other.tokens,
            self.layer_tokens + other.layer_tokens,
            self.seconds + other.seconds,
        )


class Engine(Protocol):
    """Something that runs a model with any pattern, switched without a restart.

    Attributes:
        name: engine and version: `transformers 5.23.0`.
        settings: what else a result depends on (torch, dtype, device, batch size); part of a search's identity.
        model: the model's layers, locked layers and digest.
        weights_sha256: digest of its files, see `sglang_indexcache.model_files.weight_files`.
    """

    name: str
    settings: Mapping[str, str]
    model: ModelLayers
    weights_sha256: str

    def evaluate(
        self,
        patterns: Sequence[Plan],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """Evaluate different `patterns` on `data`; yield each as it is done, in any order.

        Args:
            patterns: what to run.
            data: tokens.
            objective: what to sum up.
            rows: sequences of `data` to run, in this order; all by default.
            fresh: reuse nothing that earlier evaluations left behind.
        """
        ...

    def topk_overlap(self, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """Mean of |T_i & T_j| / |T_i| over `rows` sampled queries a sequence, `[layers, layers]` (paper, Appendix A).

        T are the tokens that a layer chooses, of dense models the pages. `None` if the engine can't measure it.
        """
        ...

    def output_similarity(self, data: TokenSet) -> NDArray[np.float64] | None:
        """Mean cosine of layer i's attention output with its own and with layer j's indices, `[i, j]`, j <= i.

        All layers below i run with the checkpoint's own pattern (paper, Appendix C). `None` if the engine can't measure
        it.
        """
        ...

    def page_signals(self, data: TokenSet, rows: int) -> Mapping[str, NDArray[np.float64]]:
        """`overlap`, `shift` and `recall` over `rows` sampled queries a sequence, see the module `page_signals`.

        Empty where no pages are chosen, or where the engine can't measure it.
        """
        ...

    def check_unchanged(self) -> None:
        """Check that the model is still the one that was loaded, before results are written that say so.

        Raises:
            IndexCacheError: naming what changed.
        """
        ...
