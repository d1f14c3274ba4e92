"""A simulator: an engine of any depth whose losses have the structure that was measured on real models.

It tests strategies at 47, 61 or 78 layers, where real evaluations take GPUs and days. The loss a token of a pattern on
a sequence is a sum over its segments (an `F` layer and the `S` layers that reuse its indices), up to a ceiling:

    loss = ceiling * (1 - exp(-sum / ceiling))
    sum = s_q * sum over segments g of cost(g) * exp(rho * n(g, F layer before)) * exp(sigma * e(g, q) - sigma^2 / 2)
    cost(g) = sum over the S layers i of g of w_i * (i - source) ** p * exp(tau * d(i, source))

w_i, a layer's weight, is lognormal: most layers share for nothing, a few are dear. d says which layers suit each other,
n how neighbouring segments interact, s_q how much a sequence depends on sparse attention (lognormal with mean 1), e how
that differs by segment; d, n and e are standard normal draws. Text and recall sequences take turns, with an s and a
sigma of their own: a layer that a task needs matters to its sequences alone. `fit_simulator.py` fits that.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexcache_search.data.tokens import TokenSet
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.evaluation.objectives import Objective
from sglang_indexcache import ModelLayers, Pattern


@dataclass(frozen=True)
class Structure:
    """Parameters of the simulator; the defaults were fitted to the demo model, see docs/evidence/search.md.

    Attributes:
        weight: mean of the logarithm of a layer's weight, in nats a token.
        spread: its standard deviation.
        distance: p, the power with which reuse over a distance costs more.
        pairs: tau, how much pairs of layers differ.
        neighbours: rho, how much neighbouring segments change each other's cost.
        sequences: standard deviation of the logarithm of s_q, for text and for recall.
        idiosyncratic: sigma, of how a sequence's costs differ by segment, for text and for recall.
        ceiling: most that a token can lose, in nats.
    """

    weight: float = -5.67
    spread: float = 2.05
    distance: float = 1.05
    pairs: float = 0.71
    neighbours: float = 0.09
    sequences: tuple[float, float] = (0.39, 3.18)
    idiosyncratic: tuple[float, float] = (0.47, 2.53)
    ceiling: float = 14.7


class SimulatedEngine:
    """Evaluates patterns of a model that does not exist.

    Args:
        num_layers: N.
        seed: another seed is another model.
        structure: parameters.
    """

    lanes, measures = 1, frozenset[str]()

    def __init__(self, num_layers: int, seed: int, structure: Structure) -> None:
        self.name = f"simulator of {num_layers} layers, seed {seed}"
        self.settings: Mapping[str, str] = {"torch": "none", "structure": str(structure)}
        digest = hashlib.sha256(f"{self.name} {structure}".encode()).hexdigest()
        self.model = ModelLayers(
            name=self.name,
            architecture="Simulated",
            layers=tuple(range(num_layers)),
            index_topk=64,
            first_sparse_position=64,
            native=Pattern.full(num_layers),
            config_sha256=digest,
        )
        self.weights_sha256 = digest
        self._seed, self._structure = seed, structure
        self._weights = np.exp(structure.weight + structure.spread * self._normal("weights", num_layers))
        self._costs: dict[tuple[int, int], float] = {}
        self._noise: dict[tuple[int, int, str], NDArray[np.float64]] = {}
        self._interactions: dict[tuple[int, int, int], float] = {}

    def check_unchanged(self) -> None:
        """Check nothing: a simulated model can't change."""

    def tokens(self, sequences: int, seq_len: int = 256, seed: int = 0) -> TokenSet:
        """Make a set whose tokens only tell sequences apart."""
        tokens = np.random.default_rng(seed).integers(0, 2**31, (sequences, seq_len)).astype(np.int32)
        scored = np.broadcast_to(np.arange(seq_len) > self.model.index_topk, tokens.shape).copy()
        return TokenSet(tokens, scored, np.arange(sequences) % 2, ("text", "recall"))

    def evaluate(
        self,
        patterns: Sequence[Pattern],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """Evaluate as `Engine.evaluate` says; both objectives are the same here, and every layer runs."""
        chosen = list(range(data.num_sequences) if rows is None else rows)
        scored = data.scored.sum(axis=1)
        sensitivity = self._lognormal(f"sequences {data.sha256}", self._structure.sequences, data)
        ceiling = self._structure.ceiling
        for pattern in patterns:
            began = time.monotonic()
            losses = ceiling * -np.expm1(-sensitivity * self._segment_losses(pattern, data) / ceiling) * scored
            yield Evaluation(
                pattern=pattern,
                rows=tuple(chosen),
                losses=tuple(losses[chosen].tolist()),
                correct=(0,) * len(chosen),
                tokens=tuple(scored[chosen].tolist()),
                layer_tokens=(self.model.num_layers * data.seq_len,) * len(chosen),
                seconds=time.monotonic() - began,
            )

    def matrix(self, name: str, data: TokenSet, rows: int) -> None:
        """Measure nothing; see `Engine.matrix`."""

    def cost(self, pattern: Pattern) -> float:
        """Return the mean over all possible sequences, as if there were no ceiling."""
        return sum(cost for _, cost in self._segments(pattern))

    def _segment_losses(self, pattern: Pattern, data: TokenSet) -> NDArray[np.float64]:
        """Return the loss per token, `[sequences]`."""
        total = np.zeros(data.num_sequences)
        for (source, end), cost in self._segments(pattern):
            key = (source, end, data.sha256)
            if key not in self._noise:
                self._noise[key] = self._lognormal(f"noise {key}", self._structure.idiosyncratic, data)
            total += cost * self._noise[key]
        return total

    def _segments(self, pattern: Pattern) -> Iterator[tuple[tuple[int, int], float]]:
        """Return the segments that share, by source and end, with their cost beside their neighbours."""
        before = -1
        for source, end in itertools.pairwise([*pattern.full_layers, len(pattern)]):
            if end > source + 1:
                yield (source, end), self._cost(source, end) * self._interaction(before, source, end)
            before = source

    def _cost(self, source: int, end: int) -> float:
        if (source, end) not in self._costs:
            layers = np.arange(source + 1, end)
            suits = self._normal(f"pairs {source}", self.model.num_layers)[layers]
            reach = (layers - source) ** self._structure.distance
            self._costs[source, end] = float(
                (self._weights[layers] * reach * np.exp(self._structure.pairs * suits)).sum()
            )
        return self._costs[source, end]

    def _interaction(self, before: int, source: int, end: int) -> float:
        if (before, source, end) not in self._interactions:
            draw = float(self._normal(f"interaction {before} {source} {end}", 1)[0])
            self._interactions[before, source, end] = float(np.exp(self._structure.neighbours * draw))
        return self._interactions[before, source, end]

    def _lognormal(self, name: str, sigmas: tuple[float, float], data: TokenSet) -> NDArray[np.float64]:
        """Draw values with mean 1, `[sequences]`; their logarithms have the deviation of each sequence's kind."""
        sigma = np.asarray(sigmas)[data.source_of]
        return np.asarray(np.exp(sigma * self._normal(name, data.num_sequences) - sigma**2 / 2))

    def _normal(self, name: str, count: int) -> NDArray[np.float64]:
        """Draw standard normal values that depend on the engine's seed and `name` alone."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(count)
