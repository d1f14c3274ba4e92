"""Cross-layer measurements on transformers models: index overlap and output similarity."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from indexcache_kernels.patching import replaced
from indexcache_search.data.tokens import sampled_queries
from indexcache_search.errors import SearchError
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import ModelLayers
from sglang_indexcache.families import family_of_modules


@torch.inference_mode()
def topk_overlap(
    model: nn.Module, description: ModelLayers, batches: Iterable[Tensor], rows: int
) -> NDArray[np.float64]:
    """Return the mean of |T_i & T_j| / k over layers i and j (paper, Appendix A).

    Args:
        model: a transformers model of a family in `sglang_indexcache.families`.
        description: its layers; the native pattern runs.
        batches: token batches `[batch, seq_len]`.
        rows: queries per sequence, evenly spread over those that see more than k tokens.

    Returns:
        `[layers, layers]`, symmetric, 1 on the diagonal.
    """
    total, count = np.zeros((description.num_layers, description.num_layers)), 0
    for batch in batches:
        sampled = torch.from_numpy(sampled_queries(batch.shape[1], description.first_sparse_position, rows))
        selected: dict[int, Tensor] = {}

        def keep(layer: int, indices: Tensor, sampled: Tensor = sampled, batch: Tensor = batch) -> None:
            chosen = indices[:, sampled.to(indices.device)].long()
            mask = torch.zeros(*chosen.shape[:2], batch.shape[1], device=indices.device)
            selected[layer] = mask.scatter_(-1, chosen, 1.0).flatten()  # noqa: B023

        with apply_roles(model, description.native, keep):
            model(input_ids=batch, use_cache=False, logits_to_keep=1)
        masks = torch.stack([selected[source].cpu() for source in description.native.source_layers])
        total += (masks @ masks.T).double().numpy() / description.index_topk
        count += len(sampled) * batch.shape[0]
    return total / count


@torch.inference_mode()
def output_similarity(model: nn.Module, description: ModelLayers, batches: Iterable[Tensor]) -> NDArray[np.float64]:
    """Return the mean cosine of layer i's attention outputs with its own and with layer j's indices.

    Args:
        model: a transformers model of a family in `sglang_indexcache.families`.
        description: its layers; the native pattern runs below layer i.
        batches: token batches `[1, seq_len]`; the indices of all layers are held for one batch.

    Returns:
        `[i, j]`, 1 on the diagonal, 0 for j > i. Only queries that see more than k tokens count (paper, Appendix C).
    """
    letters = description.num_layers
    decoder: Any = model.model
    attentions = [decoder.layers[layer].self_attn for layer in description.layers]
    indexers = family_of_modules(model).transformers.indexer_modules(model)
    total, count = np.zeros((letters, letters)), 0
    for batch in batches:
        indices: dict[int, Tensor] = {}

        def compare(
            letter: int,
            attention: Any,
            args: Any,
            kwargs: dict[str, Any],
            output: Any,
            held: dict[int, Tensor] = indices,
        ) -> None:
            own = output[0][:, description.first_sparse_position :].float()
            for other in range(letter):
                source = description.native.source_layers[other]
                again = _run_with_indices(attention, indexers[letter], args, kwargs, held[source])
                reused = again[:, description.first_sparse_position :].float()
                total[letter, other] += F.cosine_similarity(own, reused, dim=-1).double().mean().item()
            total[letter, letter] += 1.0

        hooks = [
            attention.register_forward_hook(partial(compare, letter), with_kwargs=True)
            for letter, attention in enumerate(attentions)
        ]
        try:
            with apply_roles(model, description.native, indices.__setitem__):
                model(input_ids=batch, use_cache=False, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        count += 1
    return total / count


def _run_with_indices(
    attention: Any, selector: nn.Module | None, args: Any, kwargs: dict[str, Any], indices: Tensor
) -> Tensor:
    """Return `attention`'s output `[batch, queries, hidden]` over given indices."""
    if selector is None:
        if "prev_topk_indices" not in inspect.signature(attention.forward).parameters:
            raise SearchError(f"{type(attention).__name__} of transformers takes no prev_topk_indices, expected that")
        output: Tensor = attention.forward(*args, **{**kwargs, "prev_topk_indices": indices})[0]
        return output
    with replaced((selector, "forward", lambda *_, **__: indices)):
        output = attention.forward(*args, **kwargs)[0]
    return output
