"""Greedy layer selection: Algorithm 1 of the paper, and its block-wise form (Section 3.1.2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from indexcache_search.errors import SearchError
from indexcache_search.strategies.base import Goal, Outcome, Problem, Step, Strategy, by_count, too_many
from sglang_indexcache import Pattern

EvaluateLosses = Callable[[Sequence[Pattern]], Sequence[float]]


def greedy(start: Pattern, stop: int, evaluate: EvaluateLosses, blocks: int = 1) -> Iterator[Step]:
    """Flip layers from `F` to `S`, each time the one whose flip leaves the lowest loss.

    With `blocks` P the layers are split into P contiguous blocks, whose first layers stay `F`. The best flip of each
    block is committed before the next block is searched, so a round costs about as much as one step of Algorithm 1 and
    commits up to P layers. Ties go to the lowest layer.

    Args:
        start: pattern with all layers `F` except locked ones.
        stop: final number of `F` layers.
        evaluate: returns losses of patterns, in order.
        blocks: number of blocks, P.

    Raises:
        SearchError: if `stop` can't be reached.
    """
    spans = split_blocks(len(start), blocks)
    fixed = fixed_layers(start, blocks)
    check_reachable(start, stop, blocks)
    pattern = start
    while len(pattern.full_layers) > stop:
        for span in spans:
            layers = [layer for layer in span if pattern[layer] == start.full_role and layer not in fixed]
            if not layers or len(pattern.full_layers) <= stop:
                continue
            losses = dict(zip(layers, evaluate([pattern.share(layer) for layer in layers]), strict=True))
            best = min(layers, key=lambda layer: (losses[layer], layer))
            pattern = pattern.share(best)
            yield Step(best, pattern, losses[best], losses)


def split_blocks(num_layers: int, blocks: int) -> list[range]:
    """Split layers into contiguous blocks; the earlier ones are one longer if they don't divide evenly."""
    share, extra = divmod(num_layers, blocks)
    starts = [block * share + min(block, extra) for block in range(blocks + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def fixed_layers(start: Pattern, blocks: int) -> set[int]:
    """Return the first `F` layer of each block."""
    firsts = (
        next((layer for layer in span if start[layer] == start.full_role), None)
        for span in split_blocks(len(start), blocks)
    )
    return {layer for layer in firsts if layer is not None}


def check_reachable(start: Pattern, stop: int, blocks: int = 1) -> None:
    """Check that greedy can end with `stop` `F` layers.

    Raises:
        SearchError: if it can't.
    """
    if not 1 <= blocks <= len(start):
        raise SearchError(f"--strategy has blocks={blocks}, expected 1 to {len(start)}, the number of layers")
    if stop > len(start.full_layers):
        raise too_many(stop, start)
    fixed = len(fixed_layers(start, blocks))
    if stop < fixed:
        raise SearchError(
            f"{stop} {start.full_role} layers were asked for, but blocks={blocks} keeps {fixed}; expected fewer blocks"
        )


@dataclass(frozen=True, kw_only=True)
class Greedy(Strategy):
    """Algorithm 1, optionally in blocks; everything runs on all sequences."""

    name = "greedy"
    summary = "every flip in every step, the paper's Algorithm 1; a trajectory that serves any retention"
    race: bool = field(default=False, init=False)
    blocks: int = 1

    def check(self, goal: Goal) -> None:
        """Check that every retention can be reached."""
        for full_layers in goal.full_layers.values():
            check_reachable(goal.native, full_layers, self.blocks)

    def find(self, problem: Problem) -> Outcome:
        """Run `greedy` down to the smallest retention, and take each pattern from its steps."""
        goal, steps = problem.goal, list[Step]()
        for step in greedy(goal.native, goal.fewest, problem.judge.losses, self.blocks):
            steps.append(step)
            problem.on_step(step, tuple(steps))
        patterns = by_count(goal.native, steps)
        return Outcome({retention: patterns[count] for retention, count in goal.full_layers.items()}, tuple(steps))
