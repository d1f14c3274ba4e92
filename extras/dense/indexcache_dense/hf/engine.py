"""The reference engine for dense models: only the ends of sequences run, from the first query that selects on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from indexcache_dense.hf.page_selector import ascending_pages
from indexcache_dense.hf.page_signals import page_signals
from indexcache_dense.hf.prompt_cache import PromptCache, SequenceEnd
from indexcache_dense.selection import Selection, selection_in
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.prefix import PrefixCache, run_from_cache
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf.cache_argument import cache_argument
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from sglang_indexcache.pattern import SHARED


class PageEngine(TransformersEngine):
    """Engine that evaluates patterns with a selection of pages.

    Beside the layer outputs of `TransformersEngine`, it keeps as much on the model's device: keys and values of
    beginnings that no pattern changes.
    """

    measures = frozenset({"overlap", "shift", "recall"})

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self._beginnings = PromptCache(model, self._cache.limit)
        self._signals: tuple[tuple[str, int], Mapping[str, NDArray[np.float64]]] | None = None

    def matrix(self, name: str, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """See `Engine.matrix`; `overlap`, `shift`, `[1, layers]`, and `recall`, `[layers, layers]`."""
        if self._signals is None or self._signals[0] != (data.sha256, rows):
            self._signals = (data.sha256, rows), self.page_signals(data, rows)
        return self._signals[1].get(name)

    def page_signals(self, data: TokenSet, rows: int) -> Mapping[str, NDArray[np.float64]]:
        """Return `overlap`, `shift` and `recall` over `rows` queries per sequence, see module `page_signals`."""
        ends = (self._from_choice(self.model.native, [row], data) for row in range(data.num_sequences))
        with self._attention():
            return page_signals(self.torch_model, self.model, ends, rows)

    def selections(self, pattern: Pattern, data: TokenSet, row: int, steps: int) -> dict[int, NDArray[np.int32]]:
        """See `TransformersEngine.selections`; ascending pages, a row for each key head that chooses for itself."""
        found: dict[int, NDArray[np.int32]] = {}
        selection = _selection(pattern)

        def keep(letter: int, chosen: Tensor) -> None:
            if pattern[letter] == SHARED:
                return
            last = chosen[:, -steps:]
            position = torch.arange(data.seq_len - steps, data.seq_len, device=last.device)
            last = torch.stack([ascending_pages(row, position, selection) for row in last])
            found[letter] = last[:, :, (last >= 0).any(0).any(0)].int().cpu().numpy()

        with (
            self._attention(),
            torch.inference_mode(),
            self._from_choice(pattern, [row], data) as end,
            apply_roles(self.torch_model, pattern, keep, prompt=end.prompt),
        ):
            past = cache_argument(self.torch_model, end.past)
            self.torch_model(end.tokens, **past, use_cache=end.past is not None, logits_to_keep=1)
        return found

    def _chosen_bytes(self, data: TokenSet) -> int:
        return -(-data.seq_len // _selection(self.model.native).page_tokens)

    def _begins(self, pattern: Pattern, rows: Sequence[int], data: TokenSet) -> int:
        """Return the token before the first that selects under `pattern`."""
        first = min(self.model.first_sparse_position, _selection(pattern).tokens)
        chooses = np.broadcast_to(np.arange(data.seq_len) >= first, (len(rows), data.seq_len))
        if data.prompt is not None:
            chooses = chooses & ~data.prompt[list(rows)]
        return max(0, int(chooses.any(axis=0).argmax()) - 1)

    @torch.inference_mode()
    def _hidden(
        self, pattern: Pattern, data: TokenSet, cache: PrefixCache | None, rows: Sequence[int]
    ) -> tuple[Tensor, int]:
        batch = f"{data.sha256} {rows} {pattern.selection}"
        states = PrefixCache(0) if cache is None else cache
        with self._attention(), self._from_choice(pattern, rows, data) as end:
            hidden, layers = run_from_cache(
                self.torch_model,
                self.model.layers,
                end.tokens,
                pattern,
                cache=states,
                batch=batch,
                prompt=end.prompt,
                past=end.past,
            )
        return hidden, layers * end.tokens.shape[1] + end.read * len(pattern)

    @contextmanager
    def _from_choice(self, pattern: Pattern, rows: Sequence[int], data: TokenSet) -> Iterator[SequenceEnd]:
        """Yield sequences from the first selection of `pattern` on, with a cache of the tokens before."""
        tokens, start = self._tokens(data, rows), self._begins(pattern, rows, data)
        rest, prompt = tokens[:, start:], self._prompt(data, rows, start)
        if not start:
            yield SequenceEnd(rest, prompt, None, 0)
            return
        with self._beginnings.read(f"{data.sha256} {rows} {start}", tokens[:, :start]) as (past, was_read):
            yield SequenceEnd(rest, prompt, past, was_read * start)


def _selection(pattern: Pattern) -> Selection:
    found = selection_in(pattern)
    assert found is not None
    return found
