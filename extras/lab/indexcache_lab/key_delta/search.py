"""Search of thresholds for each layer: a requested share of the products of queries with keys left out, at least loss.

For each layer alone, savings and losses are measured at some thresholds. The best mix by the sum of losses is found
exactly. Then layers trade savings while that helps, since the sum misleads where layers add to each other's errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from indexcache_lab.kernels.key_delta import kept_keys, multiply_adds
from indexcache_lab.key_delta.attention import exact_from
from indexcache_lab.key_delta.engine import Costs, KeyEngine, read_tokens
from indexcache_lab.key_delta.plan import KeyPlan
from indexcache_search.errors import SearchError
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.judge import Judge

Floats = NDArray[np.float64]

FACTORS = tuple(float(2.0 ** (number / 2)) for number in range(-6, 8))  # of a layer's mean step from key to key
OWN_SHARES = (0.4, 0.65, 0.85)  # of a layer alone, at which its loss is measured
STEP = 0.02  # of a layer's share, in the sum that is solved exactly
TRADES, ROUNDS, TRADED = 6, 3, (0.1, 0.2)


@dataclass(frozen=True)
class Curves:
    """Shares that each layer skips by threshold, on keys of the unchanged model.

    Attributes:
        thresholds: `[layers, points]`, ascending from 0.
        skipped: `[layers, points]`, shares at these thresholds.
    """

    thresholds: Floats
    skipped: Floats

    def threshold(self, layer: int, skipped: float) -> float:
        """Return the threshold at which a layer skips that share; the largest measured one if it never does."""
        return round(float(np.interp(skipped, self.skipped[layer], self.thresholds[layer])), 4)

    def uniform(self, skipped: float) -> float:
        """Return the single threshold at which all layers together skip that share."""
        measured = np.unique(self.thresholds)  # the mean of all layers is linear between these
        shares = [np.interp(measured, *pair) for pair in zip(self.thresholds, self.skipped, strict=True)]
        return float(np.interp(skipped, np.mean(shares, axis=0), measured))


@dataclass(frozen=True)
class Thresholds:
    """Result for one share: a plan, and the single threshold for all layers that skips as much."""

    asked: float
    plan: KeyPlan
    uniform: KeyPlan


class KeySearch:
    """Search of thresholds on calibration data.

    Args:
        engine: runs the dense model.
        evaluator: evaluates `kl` on the calibration set.
        costs: counts skipped products on that set, in the stage that counts.
        nothing: the plan with threshold 0 everywhere; defines the keys that stay exact.
        planned: called with the number of plans of single layers to evaluate; mixes of them follow.
        notice: called with messages.
    """

    def __init__(
        self,
        engine: KeyEngine,
        evaluator: Evaluator,
        costs: Costs,
        nothing: KeyPlan,
        planned: Callable[[int], None],
        *,
        notice: Callable[[str], None],
    ) -> None:
        self._engine, self._evaluator, self._costs = engine, evaluator, costs
        self._nothing, self._planned, self._notice = nothing, planned, notice
        self._judge = Judge.racing(evaluator)
        self._layers = len(nothing.values)

    def find(self, shares: Sequence[float]) -> list[Thresholds]:
        """Find thresholds for each share.

        Raises:
            SearchError: if a share is larger than the measurements of single layers reach.
        """
        curves = self._curves()
        reach = [[share for share in OWN_SHARES if share < most] for most in curves.skipped[:, -1]]
        most = float(np.mean([max(shares, default=0.0) for shares in reach]))
        beyond = next((share for share in shares if share > most), None)
        if beyond is not None:
            raise SearchError(
                f"--skip is {beyond:g}, expected at most {most:.2f}: what was measured reaches no further"
            )
        prices = self._prices(curves, reach)
        return [self._thresholds(share, curves, prices) for share in shares]

    def _curves(self) -> Curves:
        """Measure the unchanged model on the sequences of the first share."""
        data, device = self._evaluator.data.taken(self._judge.shares[0]), self._engine.torch_model.device
        read = torch.from_numpy(read_tokens(data)).to(device)
        counted = torch.from_numpy(self._costs.counted[self._judge.shares[0]]).to(device)
        rows = [row for row in range(data.num_sequences) if bool(counted[row].any())]
        steps = np.zeros(self._layers)  # mean step of each layer, from a key to the next
        computed, everything = np.zeros((self._layers, len(FACTORS))), np.zeros(self._layers)
        for row in rows:
            for layer, key in enumerate(self._engine.keys(self._nothing, row, data)):
                steps[layer] += key.diff(dim=1).abs().double().mean().item() / len(rows)
        for row in rows:
            position = counted[row].nonzero()[:, 0]
            near = exact_from(self._nothing, read[[row]])[0, position]
            for layer, key in enumerate(self._engine.keys(self._nothing, row, data)):
                for number, factor in enumerate(FACTORS):
                    _, moved = kept_keys(key, factor * steps[layer])
                    computed[layer, number] += int(multiply_adds(moved, position, near).sum())
                everything[layer] += int((position + 1).sum()) * key.shape[0] * key.shape[2]
        skipped = np.maximum.accumulate(1 - computed / everything[:, None], axis=1)
        zeros = np.zeros((self._layers, 1))
        return Curves(np.hstack([zeros, steps[:, None] * np.asarray(FACTORS)]), np.hstack([zeros, skipped]))

    def _prices(self, curves: Curves, reach: list[list[float]]) -> Floats:
        """Price each layer alone at each multiple of STEP, `[layers, steps]`; infinite where it skips no more."""
        plans = [
            self._nothing.with_value(layer, curves.threshold(layer, share))
            for layer in range(self._layers)
            for share in reach[layer]
        ]
        self._planned(len(plans))
        evaluations = iter(self._evaluator.evaluations(plans, self._judge.shares[0]))
        steps = np.arange(0, 1 + STEP / 2, STEP)
        prices = np.full((self._layers, len(steps)), np.inf)
        for layer, shares in enumerate(reach):
            losses = [estimates.loss(next(evaluations), self._evaluator.data).mean for _ in shares]
            costs = np.maximum.accumulate([0.0, *losses])
            known = steps <= (shares[-1] if shares else 0.0)
            prices[layer, known] = PchipInterpolator([0.0, *shares], costs)(steps[known]) if shares else 0.0
        self._notice(f"measured {len(plans)} thresholds of single layers")
        return prices

    def _thresholds(self, asked: float, curves: Curves, prices: Floats) -> Thresholds:
        aim = asked
        for _ in range(3):  # layers that run with others' errors skip a little more or less than alone
            allocated = allocate(prices, aim)
            if allocated is None:
                raise SearchError(f"--skip is {asked:g}, more than layers can leave out together")
            shares, plan = allocated, self._plan(curves, allocated)
            missing = asked - self._costs.skipped(plan).mean
            if abs(missing) < 0.002:
                break
            aim += missing
        plan = self._traded(plan, shares, curves, prices)
        return Thresholds(asked, plan, self._uniform(self._costs.skipped(plan).mean, curves))

    def _plan(self, curves: Curves, shares: Sequence[float]) -> KeyPlan:
        values = tuple(curves.threshold(layer, share) for layer, share in enumerate(shares))
        return replace(self._nothing, values=values)

    def _traded(self, plan: KeyPlan, shares: list[float], curves: Curves, prices: Floats) -> KeyPlan:
        """Trade while the loss falls: one layer skips more and another as much less."""
        for number in range(ROUNDS):
            options = [shares, *self._trades(shares, prices)]
            plans = [plan, *(self._plan(curves, option) for option in options[1:])]
            choice = self._judge.choose(plans, plan)
            best = choice.best
            if choice.increases[best] >= -self._judge.noise(plans[best], plan):
                break
            plan, shares = plans[best], options[best]
            self._notice(f"trade {number + 1}: KL {choice.loss:.4f}")
        return plan

    def _trades(self, shares: list[float], prices: Floats) -> list[list[float]]:
        """List the trades whose sum of prices rises least, each pair of layers once."""
        ranked = []
        at = [round(share / STEP) for share in shares]
        for (more, less), traded in itertools.product(itertools.permutations(range(self._layers), 2), TRADED):
            step = round(traded / STEP)
            up, down = at[more] + step, at[less] - step
            if down >= 0 and up < prices.shape[1] and np.isfinite(prices[more, up]):
                rise = prices[more, up] - prices[more, at[more]] + prices[less, down] - prices[less, at[less]]
                ranked.append((float(rise), more, less, traded))
        trades: list[list[float]] = []
        used: set[int] = set()
        for _, more, less, traded in sorted(ranked):
            if len(trades) < TRADES and not {more, less} & used:  # no layer twice, so that guesses differ
                used |= {more, less}
                option = list(shares)
                option[more], option[less] = option[more] + traded, option[less] - traded
                trades.append(option)
        return trades

    def _uniform(self, skipped: float, curves: Curves) -> KeyPlan:
        """Find the plan with a single threshold that skips `skipped` as measured."""
        aim = skipped
        for _ in range(4):
            plan = replace(self._nothing, values=(round(curves.uniform(aim), 4),) * self._layers)
            missing = skipped - self._costs.skipped(plan).mean
            if abs(missing) < 0.0005:
                break
            aim += missing
        return plan


def allocate(prices: Floats, share: float) -> list[float] | None:
    """Find shares of layers with the least sum of prices, whose mean is `share`, to one STEP of one layer.

    Args:
        prices: `[layers, steps]`, of each layer at each multiple of STEP.
        share: 0 to 1.

    Returns:
        A share for each layer; `None` if there is none.
    """
    layers, steps = prices.shape
    total = round(share / STEP * layers)
    if not 0 <= total <= layers * (steps - 1):
        return None
    best = np.full(total + 1, np.inf)
    best[0], choices = 0.0, np.zeros((layers, total + 1), np.int64)
    for layer in range(layers):
        sums = np.full((steps, total + 1), np.inf)
        for step in range(min(steps, total + 1)):
            sums[step, step:] = best[: total + 1 - step] + prices[layer, step]
        choices[layer], best = sums.argmin(0), sums.min(0)
    if not np.isfinite(best[total]):
        return None
    shares = []
    for layer in reversed(range(layers)):
        step = int(choices[layer, total])
        shares.append(step * STEP)
        total -= step
    return shares[::-1]
