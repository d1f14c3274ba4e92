"""Search of thresholds for each layer: a requested share of the products of queries with keys left out, at least loss.

For each layer alone, savings and losses are measured at some thresholds. The best mix by the sum of losses is found
exactly. Then layers trade savings while that helps, since the sum misleads where layers add to each other's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from indexcache_kernels.key_delta import kept_keys, multiply_adds
from indexcache_search.errors import SearchError
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.judge import Judge
from indexcache_search.lab.key_delta.attention import exact_from
from indexcache_search.lab.key_delta.costs import Costs
from indexcache_search.lab.key_delta.plan import KeyPlan
from indexcache_search.lab.key_delta.runs import KeyRuns, read_tokens

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
        low, high = 0.0, float(self.thresholds.max())
        for _ in range(40):
            middle = (low + high) / 2
            shares = [np.interp(middle, *pair) for pair in zip(self.thresholds, self.skipped, strict=True)]
            low, high = (middle, high) if np.mean(shares) < skipped else (low, middle)
        return high


@dataclass(frozen=True)
class Thresholds:
    """Result for one share: a plan, and the single threshold for all layers that skips as much."""

    asked: float
    plan: KeyPlan
    uniform: KeyPlan


@dataclass(frozen=True)
class KeyListeners:
    """Callbacks of a search.

    Attributes:
        planned: receives the number of plans of single layers to evaluate; mixes of them follow.
        notice: receives other messages.
    """

    planned: Callable[[int], None] = lambda plans: None
    notice: Callable[[str], None] = lambda line: None


class KeySearch:
    """Search of thresholds on calibration data.

    Args:
        runs: runs the dense model.
        evaluator: evaluates `kl` on the calibration set.
        costs: counts skipped products on that set, in the stage that counts.
        near: the plan with threshold 0 everywhere; defines the keys that stay exact.
        listeners: receive messages and counts.
    """

    def __init__(
        self,
        runs: KeyRuns,
        evaluator: Evaluator,
        costs: Costs,
        near: KeyPlan,
        listeners: KeyListeners,
    ) -> None:
        self._runs, self._evaluator, self._costs = runs, evaluator, costs
        self._nothing, self._listeners = near, listeners
        self._judge = Judge.racing(evaluator)
        self._layers = len(near.values)

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
        data = self._evaluator.data.taken(self._judge.shares[0])
        read = torch.from_numpy(read_tokens(data))
        counted = torch.from_numpy(self._costs.counted[self._judge.shares[0]])
        rows = [row for row in range(data.num_sequences) if bool(counted[row].any())]
        steps = np.zeros(self._layers)  # mean step of each layer, from a key to the next
        computed, everything = np.zeros((self._layers, len(FACTORS))), np.zeros(self._layers)

        def measure(layer: int, key: torch.Tensor) -> None:
            steps[layer] += key.diff(dim=2).abs().double().mean().item() / len(rows)

        def count(row: int, layer: int, key: torch.Tensor) -> None:
            position = counted[row].nonzero()[:, 0].to(key.device)
            near = exact_from(self._nothing, read[[row]].to(key.device))[0, position]
            for number, factor in enumerate(FACTORS):
                own, all_ = multiply_adds(kept_keys(key[0], factor * steps[layer])[1], position, near)
                computed[layer, number] += int(own.sum())
            everything[layer] += all_ * key.shape[1]

        for row in rows:
            self._runs.watch(self._nothing, row, data, measure)
        for row in rows:
            self._runs.watch(self._nothing, row, data, partial(count, row))
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
        self._listeners.planned(len(plans))
        losses = iter(self._losses(plans, self._judge.shares[0]))
        steps = np.arange(0, 1 + STEP / 2, STEP)
        prices = np.full((self._layers, len(steps)), np.inf)
        for layer, shares in enumerate(reach):
            costs = np.maximum.accumulate([0.0, *(max(0.0, next(losses)) for _ in shares)])
            known = steps <= (shares[-1] if shares else 0.0)
            prices[layer, known] = PchipInterpolator([0.0, *shares], costs)(steps[known]) if shares else 0.0
        self._listeners.notice(f"measured {len(plans)} thresholds of single layers")
        return prices

    def _losses(self, plans: Sequence[KeyPlan], rows: Sequence[int]) -> list[float]:
        evaluations = self._evaluator.evaluations(plans, rows)
        return [estimates.loss(item, self._evaluator.data).mean for item in evaluations]

    def _thresholds(self, asked: float, curves: Curves, prices: Floats) -> Thresholds:
        aim = asked
        for _ in range(3):  # layers that run with others' errors skip a little more or less than alone
            shares = self._shares(prices, aim, asked)
            plan = self._plan(curves, shares)
            missing = asked - self._costs.skipped(plan).mean
            if abs(missing) < 0.002:
                break
            aim += missing
        plan = self._traded(plan, shares, curves, prices)
        return Thresholds(asked, plan, self._uniform(self._costs.skipped(plan).mean, curves))

    def _shares(self, prices: Floats, aim: float, asked: float) -> list[float]:
        shares = allocate(prices, aim)
        if shares is None:
            raise SearchError(f"--skip is {asked:g}, more than layers can leave out together")
        return shares

    def _plan(self, curves: Curves, shares: Sequence[float]) -> KeyPlan:
        values = tuple(curves.threshold(layer, share) for layer, share in enumerate(shares))
        return replace(self._nothing, values=values)

    def _traded(self, plan: KeyPlan, shares: list[float], curves: Curves, prices: Floats) -> KeyPlan:
        """Trade while the loss falls: one layer skips more and another as much less."""
        for number in range(ROUNDS):
            options = self._trades(shares, prices)
            plans = [self._plan(curves, option) for option in options]
            if not plans:
                break
            choice = self._judge.choose([plan, *plans], plan)
            best = choice.best - 1
            if best < 0 or choice.increases[choice.best] >= -self._judge.noise(plans[best], plan):
                break
            plan, shares = plans[best], options[best]
            self._listeners.notice(f"trade {number + 1}: KL {choice.loss:.4f}")
        return plan

    def _trades(self, shares: list[float], prices: Floats) -> list[list[float]]:
        """List the trades whose sum of prices rises least, each pair of layers once."""
        ranked = []
        at = [round(share / STEP) for share in shares]
        for more in range(self._layers):
            for less in range(self._layers):
                for traded in TRADED:
                    step = round(traded / STEP)
                    up, down = at[more] + step, at[less] - step
                    if more == less or down < 0 or up >= prices.shape[1] or not np.isfinite(prices[more, up]):
                        continue
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
