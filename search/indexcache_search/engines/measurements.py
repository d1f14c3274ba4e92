"""Cross-layer measurements on transformers models: index overlap and output similarity."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
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
def topk_overlap(model: nn.Module, description: ModelLayers, tokens: Tensor, rows: int) -> NDArray[np.float64]:
    """Return the mean of |T_i & T_j| / k over layers i and j (paper, Appendix A).

    Args:
        model: a transformers model of a family in `sglang_indexcache.families`.
        description: its layers; the native pattern runs.
        tokens: of a sequence, `[1, seq_len]`.
        rows: how many queries, evenly spread over those that see more than k tokens.

    Returns:
        `[layers, layers]`, symmetric, 1 on the diagonal.
    """
    selected: dict[int, Tensor] = {}  # by layer, [queries, tokens]: 1 for selected tokens

    def keep(layer: int, indices: Tensor) -> None:
        length = indices.shape[1]
        sampled = torch.from_numpy(sampled_queries(length, description.first_sparse_position, rows))
        chosen = indices[0, sampled.to(indices.device)].long()
        selected[layer] = torch.zeros(len(chosen), length, device=indices.device).scatter_(-1, chosen, 1.0)

    with apply_roles(model, description.native, keep):
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    masks = torch.stack([selected[source].cpu().flatten() for source in description.native.source_layers])
    return np.asarray((masks @ masks.T).double().numpy() / description.index_topk / len(selected[0]))


@torch.inference_mode()
def output_similarity(model: nn.Module, description: ModelLayers, tokens: Tensor) -> NDArray[np.float64]:
    """Return the mean cosine of layer i's attention outputs with its own and with layer j's indices.

    Args:
        model: a transformers model of a family in `sglang_indexcache.families`.
        description: its layers; the native pattern runs below layer i.
        tokens: of a sequence, `[1, seq_len]`; the indices of all layers are held.

    Returns:
        `[i, j]`, 1 on the diagonal, 0 for j > i. Only queries that see more than k tokens count (paper, Appendix C).
    """
    letters = description.num_layers
    decoder: Any = model.model
    indexers = family_of_modules(model).transformers.indexer_modules(model)
    total = np.zeros((letters, letters))
    indices: dict[int, Tensor] = {}

    def compare(letter: int, attention: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        own = output[0][:, description.first_sparse_position :].float()
        for other in range(letter):
            source = description.native.source_layers[other]
            again = _run_with_indices(attention, indexers[letter], args, kwargs, indices[source])
            reused = again[:, description.first_sparse_position :].float()
            total[letter, other] += F.cosine_similarity(own, reused, dim=-1).double().mean().item()
        total[letter, letter] += 1.0

    with ExitStack() as stack:
        for letter, layer in enumerate(description.layers):
            attention = decoder.layers[layer].self_attn
            stack.enter_context(attention.register_forward_hook(partial(compare, letter), with_kwargs=True))
        stack.enter_context(apply_roles(model, description.native, indices.__setitem__))
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    return total


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
