"""Signals of a dense model's layers: common pages, and the inputs of DELTA's and Kascade's rules."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.hf.prompt_cache import SequenceEnd
from indexcache_dense.selection import selection_in
from indexcache_search.data.tokens import sampled_queries
from indexcache_search.hf.cache_argument import cache_argument
from sglang_indexcache import ModelLayers


@torch.inference_mode()
def page_signals(
    model: Any, description: ModelLayers, ends: Iterable[AbstractContextManager[SequenceEnd]], rows: int
) -> dict[str, NDArray[np.float64]]:
    """Measure the signals of a model that shares nothing.

    Args:
        model: a model of the family `dense_gqa`.
        description: its layers, and the selection of its native pattern.
        ends: of each sequence, one at a time; after a beginning all tokens but the first one select.
        rows: queries per sequence, evenly spread over those that select.

    Returns:
        `overlap`, `[layers, layers]`: share of selected pages that two layers have in common, mean over queries.
        `shift`, `[1, layers]`: 1 - cosine between the attention of a layer, heads concatenated, and of the layer below,
        mean over queries; 0 for the first layer (arXiv 2510.09883, Appendix D). `recall`, `[layer, source]`: share of
        a layer's attention to its own pages that the source's pages hold, mean over heads, worst query of a sequence,
        mean over sequences; times 1 - cosine of the layer's input before and after its attention.
    """
    letters = description.num_layers
    overlap, recall = np.zeros((letters, letters)), np.zeros((letters, letters))
    shift, weight, count = np.zeros((1, letters)), np.zeros(letters), 0
    for end in ends:
        with end as given:
            tokens, past = given.tokens, given.past
            first = min(description.first_sparse_position, tokens.shape[1] - 1) if past is None else 1
            sampled = torch.from_numpy(sampled_queries(tokens.shape[1], first, rows)).to(tokens.device)
            pass_ = _Pass(sampled, description)
            with ExitStack() as stack:
                for layer in model.model.layers:
                    stack.enter_context(layer.register_forward_pre_hook(pass_.before, with_kwargs=True))
                    stack.enter_context(layer.self_attn.register_forward_hook(pass_.after))
                roles = apply_page_roles(model, description.native, observe=pass_.pages, watch=pass_.attention)
                stack.enter_context(roles)
                model(input_ids=tokens, **cache_argument(model, past), use_cache=past is not None, logits_to_keep=1)
        shift[0] += pass_.shift
        recall += pass_.recalled()
        overlap += pass_.overlap()
        weight += pass_.weight
        count += 1
    return {"overlap": overlap / count, "shift": shift / count, "recall": recall * weight[:, None] / count**2}


class _Pass:
    """Attention and pages of one sequence's sampled queries."""

    def __init__(self, sampled: Tensor, description: ModelLayers) -> None:
        selection = selection_in(description.native)
        assert selection is not None
        self._sampled, self._page_tokens, self._letters = sampled, selection.page_tokens, description.num_layers
        self.shift, self.weight = np.zeros(self._letters), np.zeros(self._letters)
        self._below: Tensor | None = None
        self._blocks: list[Tensor] = []  # of the layer that runs
        self._input = torch.empty(0)
        self._mass: list[Tensor] = []  # by layer `[rows * queries, pages]`: mean over the heads of a row
        self._kept: list[Tensor] = []  # by layer `[rows * queries, pages]`, bool; for rows see `hf.page_selector`

    def before(self, module: Any, args: Any, kwargs: Any) -> None:
        """Keep a decoder layer's input, to which its attention output is added."""
        self._input = (args[0] if args else kwargs["hidden_states"])[0, self._sampled].float()

    def after(self, module: Any, args: Any, output: Any) -> None:
        """Measure how much a layer's attention changes its input."""
        attended = output[0][0, self._sampled].float()
        cosine = F.cosine_similarity(self._input, self._input + attended, dim=-1)
        self.weight[module.layer_idx] = 1.0 - cosine.double().mean().item()

    def attention(self, layer: int, first: int, weights: Tensor) -> None:
        """Keep the sampled queries of a block of a layer's attention, `[1, heads, queries, keys]`."""
        inside = self._sampled[(self._sampled >= first) & (self._sampled < first + weights.shape[2])] - first
        self._blocks.append(weights[0, :, inside].float())  # [heads, queries, keys]

    def pages(self, layer: int, kept: Tensor) -> None:
        """Take the pages a layer selected, `[rows, queries, pages]`, after all of its attention."""
        self._kept.append(kept[:, self._sampled].flatten(0, 1))
        longest = max(block.shape[2] for block in self._blocks)
        sampled = torch.cat([F.pad(block, (0, longest - block.shape[2])) for block in self._blocks], 1)
        self._blocks.clear()
        flat = sampled.transpose(0, 1).flatten(1)
        if self._below is not None:
            self.shift[layer] = 1.0 - F.cosine_similarity(flat, self._below, dim=-1).double().mean().item()
        self._below = flat
        by_row = sampled.view(len(kept), -1, *sampled.shape[1:]).mean(1).flatten(0, 1)
        padded = F.pad(by_row, (0, -sampled.shape[2] % self._page_tokens))
        self._mass.append(padded.view(len(padded), -1, self._page_tokens).sum(2))

    def overlap(self) -> NDArray[np.float64]:
        """Return `[layers, layers]`, mean over queries; all layers select equally many pages."""
        chosen = torch.stack(self._kept).double().flatten(1)
        common = chosen @ chosen.mT
        shares: NDArray[np.float64] = (common / common.diagonal()).cpu().numpy()
        return shares

    def recalled(self) -> NDArray[np.float64]:
        """Return `[layer, source]` for the worst query."""
        recall = np.zeros((self._letters, self._letters))
        for layer, mass in enumerate(self._mass):
            own = (mass * self._kept[layer]).sum(1)
            for source in range(layer + 1):
                held = (mass * self._kept[source]).sum(1)
                recall[layer, source] = (held / own).min().item()
        return recall
