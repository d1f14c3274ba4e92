"""Runs of a dense model under plans for keys: what the last ones gave, and what all of them cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indexcache_search.data.tokens import TokenSet
from indexcache_search.hf.keys import apply_key_plan
from indexcache_search.key_plan import KeyPlan, Stage
from indexcache_search.plans import Plan
from sglang_indexcache import Pattern

HELD = 64  # runs whose hidden states are kept: loss, divergence and cost are asked for one after the other


class KeyRuns:
    """Runs each plan on sequences once, whichever of its figures is asked for first.

    Args:
        model: a dense model of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hidden: OrderedDict[tuple[KeyPlan, str, tuple[int, ...]], Tensor] = OrderedDict()
        self._work: dict[tuple[KeyPlan, str, int, Stage], tuple[int, int]] = {}

    @torch.inference_mode()
    def hidden(self, plan: KeyPlan, rows: Sequence[int], data: TokenSet) -> Tensor:
        """Post-norm hidden states `[rows, tokens, hidden]`."""
        key = (plan, data.sha256, tuple(rows))
        if key not in self._hidden:
            device = self._model.device
            tokens = torch.from_numpy(data.tokens[list(rows)].astype(np.int64)).to(device)
            read = torch.from_numpy(read_tokens(data)[list(rows)]).to(device)
            with apply_key_plan(self._model, plan, read) as work:
                self._hidden[key] = self._model.model(input_ids=tokens, use_cache=False).last_hidden_state
            for stage, computed in work.computed.items():
                pairs = zip(computed.tolist(), work.everything[stage].tolist(), strict=True)
                for row, pair in zip(rows, pairs, strict=True):
                    self._work[plan, data.sha256, row, stage] = pair
            while len(self._hidden) > HELD:
                self._hidden.popitem(last=False)
        return self._hidden[key]

    def work(self, plan: Plan, row: int, data: TokenSet, stage: Stage) -> tuple[int, int]:
        """Products of queries with keys of a sequence: computed, and those of attention to everything.

        Of plans for keys multiply-adds, counted in the run; of patterns pairs of a query and a key.
        """
        if isinstance(plan, Pattern):
            return pairs_of(plan, read_tokens(data)[row], stage)
        key = (plan, data.sha256, row, stage)
        if key not in self._work:
            self.hidden(plan, [row], data)
        return self._work[key]


def read_tokens(data: TokenSet) -> NDArray[np.bool_]:
    """`[sequences, tokens]`: what is read at once: prompts, and texts that nobody replied in."""
    if data.prompt is None:
        return np.ones_like(data.tokens, dtype=bool)
    return np.asarray(data.prompt | ~data.prompt.any(axis=1, keepdims=True))


def pairs_of(pattern: Pattern, read: NDArray[np.bool_], stage: Stage) -> tuple[int, int]:
    """Pairs of a query and a key in all layers: those that a pattern of a dense model leaves, and all.

    What is read attends to everything. `read` is `[tokens]`.
    """
    selection = pattern.selection
    assert selection is not None
    position = np.flatnonzero(read if stage == "reading" else ~read)
    everything = int((position + 1).sum())
    chosen = (selection.pages - 1) * selection.page_tokens + position % selection.page_tokens + 1
    few = everything if stage == "reading" else int(np.minimum(position + 1, chosen).sum())
    dense = len(pattern.full_layers)
    return dense * everything + (len(pattern) - dense) * few, len(pattern) * everything
