"""Runs of a dense model under plans for keys: what the last ones gave, and what all of them cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from indexcache_search.data.tokens import TokenSet
from indexcache_search.hf.keys import Stage, apply_key_plan
from indexcache_search.key_plan import KeyPlan

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
            read = torch.from_numpy(_read(data)[list(rows)]).to(device)
            with apply_key_plan(self._model, plan, read) as work:
                self._hidden[key] = self._model.model(input_ids=tokens, use_cache=False).last_hidden_state
            for stage, computed in work.computed.items():
                pairs = zip(computed.tolist(), work.everything[stage].tolist(), strict=True)
                for row, pair in zip(rows, pairs, strict=True):
                    self._work[plan, data.sha256, row, stage] = pair
            while len(self._hidden) > HELD:
                self._hidden.popitem(last=False)
        return self._hidden[key]

    def work(self, plan: KeyPlan, row: int, data: TokenSet, stage: Stage) -> tuple[int, int]:
        """Multiply-adds of queries with keys of a sequence: computed, and those of attention to everything."""
        key = (plan, data.sha256, row, stage)
        if key not in self._work:
            self.hidden(plan, [row], data)
        return self._work[key]


def _read(data: TokenSet) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """`[sequences, tokens]`: what is read at once: prompts, and texts that nobody replied in."""
    if data.prompt is None:
        return np.ones_like(data.tokens, dtype=bool)
    return np.asarray(data.prompt | ~data.prompt.any(axis=1, keepdims=True))
