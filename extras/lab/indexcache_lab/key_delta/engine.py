"""The reference engine for dense models, with plans for keys beside patterns, and all costs counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from indexcache_dense.hf.engine import PageEngine
from indexcache_dense.selection import CHUNK, COMPRESSED_KEYS, ROUNDED_KEYS, STRIDE, selection_in
from indexcache_kernels.patching import replaced
from indexcache_lab.dense import key_heads
from indexcache_lab.key_delta.attention import apply_key_plan
from indexcache_lab.key_delta.plan import METHODS, KeyPlan, Stage
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.prefix import PrefixCache
from indexcache_search.errors import SearchError
from indexcache_search.evaluation import estimates
from indexcache_search.evaluation.estimates import Estimate
from indexcache_search.evaluation.journal import Journal
from indexcache_search.evaluation.losses import Losses
from indexcache_search.evaluation.plan import Plan
from indexcache_search.hf.cache_argument import cache_argument
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.pattern import DENSE, FULL, SHARED


class KeyEngine(PageEngine):
    """An engine that evaluates plans for keys, and patterns as usual.

    A plan runs once on a sequence, for loss, divergence and costs, and from the first layer that it changes. So
    `prefix_cache_gb` is also the host memory for layer outputs of the unchanged model (without room for those of one
    batch, plans run in full), and for the last runs' hidden states.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unchanged: OrderedDict[tuple[str, tuple[int, ...]], list[Tensor]] = OrderedDict()
        self._last: OrderedDict[tuple[KeyPlan, str, tuple[int, ...]], Tensor] = OrderedDict()
        self._computed: dict[tuple[KeyPlan, str, int], NDArray[np.int64]] = {}  # multiply-adds of each token

    @staticmethod
    def parse(key: str) -> Plan:
        """Parse the key of a plan, see `Journal`."""
        if key.partition("|")[0] not in METHODS:
            return Pattern.from_key(key)
        try:
            return KeyPlan.from_key(key)
        except SearchError as error:
            raise PatternError(str(error)) from None

    def runner(
        self, plan: Plan, data: TokenSet, cache: PrefixCache | None
    ) -> Callable[[Sequence[int]], tuple[Tensor, int]]:
        """See `TransformersEngine.runner`."""
        return partial(self.run_plan, plan, data) if isinstance(plan, KeyPlan) else super().runner(plan, data, cache)

    @torch.inference_mode()
    def run_plan(self, plan: KeyPlan, data: TokenSet, rows: Sequence[int]) -> tuple[Tensor, int]:
        """Return post-norm hidden states, `[rows, tokens, hidden]`, and the layer-tokens of a row."""
        key = (plan, data.sha256, tuple(rows))
        if key not in self._last:
            model, tokens = self.torch_model.model, self._tokens(data, rows)
            read = torch.from_numpy(read_tokens(data)[list(rows)]).to(tokens.device)
            below = next((layer for layer, value in enumerate(plan.values) if value), 0)
            inputs = self._layer_inputs(plan, key[1:], tokens, read) if below and plan.method == "key_delta" else []
            layers = model.layers[: below if inputs else 0]
            given = inputs[below].to(tokens.device) if inputs else None
            with (
                replaced(*((layer, "forward", lambda *_, **__: given) for layer in layers)),
                apply_key_plan(self.torch_model, plan, read) as counts,
            ):
                self._last[key] = model(input_ids=tokens, use_cache=False).last_hidden_state
            computed = torch.stack(counts).sum(0).cpu().numpy() + len(layers) * self._everything(data)
            for row, of_tokens in zip(rows, computed, strict=True):
                self._computed[plan, data.sha256, row] = of_tokens
            while len(self._last) > 1 and sum(item.nbytes for item in self._last.values()) > self._cache.limit:
                self._last.popitem(last=False)
        return self._last[key], len(plan.values) * data.seq_len

    def _layer_inputs(
        self, plan: KeyPlan, batch: tuple[str, tuple[int, ...]], tokens: Tensor, read: Tensor
    ) -> list[Tensor]:
        """Return each layer's input in the unchanged model, `[rows, tokens, hidden]`; none if there is no room."""
        model = self.torch_model
        size = tokens.numel() * model.config.hidden_size * model.dtype.itemsize * len(plan.values)
        if size > self._cache.limit:
            return []
        if batch not in self._unchanged:
            while self._unchanged and (len(self._unchanged) + 1) * size > self._cache.limit:
                self._unchanged.popitem(last=False)
            with apply_key_plan(model, replace(plan, values=(0.0,) * len(plan.values)), read):
                states = model.model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states
            self._unchanged[batch] = [state.cpu() for state in states]
        self._unchanged.move_to_end(batch)
        return self._unchanged[batch]

    @torch.inference_mode()
    def keys(self, plan: KeyPlan, row: int, data: TokenSet) -> list[Tensor]:
        """Run a sequence under `plan`, and return the exact keys of each layer, `[G, L, D]`."""
        model, cache = self.torch_model.model, DynamicCache(config=self.torch_model.config)
        with apply_key_plan(self.torch_model, plan):
            model(input_ids=self._tokens(data, [row]), **cache_argument(model, cache), use_cache=True)
        return [layer.keys[0] for layer in cache.layers]

    def work(self, plan: Plan, row: int, data: TokenSet, stage: Stage) -> tuple[int, int]:
        """Count a sequence's products of queries with keys: those computed, and those of attention to everything.

        Plans for keys count multiply-adds during the run; patterns count pairs of a query and a key.
        """
        if plan.pattern is not None:
            return pairs_of(
                plan.pattern, read_tokens(data)[row], None if data.prompt is None else data.prompt[row], stage
            )
        assert isinstance(plan, KeyPlan)
        key = (plan, data.sha256, row)
        if key not in self._computed:
            self.run_plan(plan, data, [row])
        counts, tokens = self._computed[key], in_stage(read_tokens(data)[row], stage)
        return int(counts[tokens].sum()), len(plan.values) * int(self._everything(data)[tokens].sum())

    def _everything(self, data: TokenSet) -> NDArray[np.int64]:
        """Return the multiply-adds of each token with all keys that it sees in one layer, `[tokens]`."""
        heads, dim = key_heads(self.torch_model.config)
        return np.arange(1, data.seq_len + 1) * heads * dim


def read_tokens(data: TokenSet) -> NDArray[np.bool_]:
    """Return the mask of tokens that are read at once, `[sequences, tokens]`: prompts, and texts without replies."""
    if data.prompt is None:
        return np.ones_like(data.tokens, dtype=bool)
    return np.asarray(data.prompt | ~data.prompt.any(axis=1, keepdims=True))


def in_stage(read: NDArray[np.bool_], stage: Stage) -> NDArray[np.bool_]:
    """Return the part of `read_tokens` in `stage`."""
    return read if stage == "reading" else ~read


def pairs_of(
    pattern: Pattern, read: NDArray[np.bool_], prompt: NDArray[np.bool_] | None, stage: Stage
) -> tuple[int, int]:
    """Count pairs of a query and a key in all layers: those under a pattern of a dense model, and all.

    A prompt attends to everything, and so does an `F` layer that selects by its attention. Compressed and rounded
    keys count as keys. `read` and `prompt` are `[tokens]`; without a prompt every token selects, as if the text was a
    reply.
    """
    selection = selection_in(pattern)
    assert selection is not None
    position = np.flatnonzero(in_stage(read, stage))
    chooses = np.ones(len(position), bool) if prompt is None else ~prompt[position]
    chosen = (selection.pages - 1) * selection.page_tokens + position % selection.page_tokens + 1
    few = np.where(chooses, np.minimum(position + 1, chosen), position + 1)
    compressed = np.where(few <= position, np.maximum((position + 1 - CHUNK) // STRIDE + 1, 0), 0)
    digests = {COMPRESSED_KEYS: compressed, ROUNDED_KEYS: np.where(few <= position, position + 1, 0)}
    own = few + digests[selection.score] if selection.score in digests else position + 1
    pairs = {SHARED: few, FULL: own, DENSE: position + 1}
    return sum(int(pairs[role].sum()) for role in pattern.roles), len(pattern) * int((position + 1).sum())


class Costs:
    """Counts of the products of queries with keys that plans leave out, in reading or in decoding.

    `part` names the data in the journal, which keeps the counts.

    Attributes:
        counted: `[sequences, tokens]`, the tokens in that stage.
        rows: sequences with such tokens.
    """

    def __init__(self, engine: KeyEngine, data: TokenSet, journal: Journal, stage: Stage, part: str) -> None:
        self._engine, self._data, self._journal, self._stage, self._part = engine, data, journal, stage, part
        self.counted = in_stage(read_tokens(data), stage)
        self.rows = tuple(np.flatnonzero(self.counted.any(axis=1)).tolist())

    def skipped(self, plan: Plan) -> Estimate:
        """Return the share of the products that `plan` leaves out."""
        name = f"products, {self._part}, {self._stage}: {plan.key}"
        pairs = self._journal.matrix(name)
        if pairs is None:
            work = (self._engine.work(plan, row, self._data, self._stage) for row in self.rows)
            pairs = [[float(computed), float(everything)] for computed, everything in work]
            self._journal.add_matrix(name, pairs)
        computed, everything = zip(*pairs, strict=True)
        share = estimates.loss(Losses(rows=self.rows, losses=computed, tokens=everything), self._data)
        return replace(share, mean=1.0 - share.mean)


def main_stage(data: TokenSet) -> Stage:
    """Return the stage of the majority of tokens."""
    return "reading" if read_tokens(data).mean() >= 0.5 else "decoding"
