"""transformers' DSA models on these kernels: no `[queries, keys]` tensor at all.

Three things change while it lasts. The mask is each query's range of keys. The indexer selects with `indexer_topk`.
Keys stay latent, and the attention over the selected ones is absorbed MLA: `q . (W k) = (W^T q) . k`, so that all heads
share what is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v32 import modeling_deepseek_v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa

from indexcache_kernels.backends import Backend
from indexcache_kernels.errors import KernelInputError
from indexcache_kernels.indexer_forward import check_indexer, indexer_forward
from indexcache_kernels.indexer_topk import indexer_topk
from indexcache_kernels.patching import replaced
from indexcache_kernels.sparse_attention import sparse_attention

NAME = "indexcache_kernels"  # among transformers' attention implementations
TESTED = "5.17 to 5.24"  # versions of transformers; pyproject.toml allows no others
Attend = Callable[[Tensor, Tensor, int, Tensor, float], tuple[Tensor, Tensor]]
"""`sparse_attention`, or what does the same, for absorbed queries and latent keys."""
ROWS = 8192  # queries whose absorbed copies exist at a time: 0.6 GB for 64 heads in bfloat16
_ATTEND = "indexcache_attend"  # what an attention module attends by
_NOT_OF_RANGES = {"allow_is_causal_skip", "config", "dtype", "use_vmap"}  # how transformers makes a tensor of a mask
INDEXER_ROPES = {  # by model type; V3.2 rotates halves of an index vector, GLM-5 pairs
    "deepseek_v32": modeling_deepseek_v32.apply_rotary_pos_emb,
    "glm_moe_dsa": modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave,
}


def check_transformers() -> None:
    """Check that this version of transformers has the parts that change, called as they are here.

    Raises:
        KernelInputError: with the first difference.
    """
    found = f"transformers is {transformers.__version__}, expected {TESTED}"
    if not hasattr(modeling_glm_moe_dsa.GlmMoeDsaAttention, "expand_kv"):
        raise KernelInputError(f"{found}: GlmMoeDsaAttention has no expand_kv")
    for indexer in (modeling_glm_moe_dsa.GlmMoeDsaIndexer, modeling_deepseek_v32.DeepseekV32Indexer):
        try:
            check_indexer(indexer)
        except KernelInputError as error:
            raise KernelInputError(f"{found}: {error}") from None


@contextmanager
def use_kernels(
    model: nn.Module, backend: Backend = "auto", attend: Callable[..., tuple[Tensor, Tensor]] = sparse_attention
) -> Iterator[None]:
    """Run a transformers DSA model on the kernels inside the `with` block; leave it as it was afterwards.

    What is computed is the same but for rounding. Of equal index scores the lowest keys are selected, and queries that
    see fewer keys than index_topk have -1 for the rest, where transformers fills up with keys that they don't see.
    With gradient checkpointing the backward pass belongs into the block, too, since it runs layers again.

    Args:
        model: a `DeepseekV32ForCausalLM` or `GlmMoeDsaForCausalLM`, on one device. Key/value caches are not
            exchangeable with those of the untouched model.
        backend: see `indexcache_kernels.indexer_topk`.
        attend: `sparse_attention`, or one with gradients on every backend, for training.

    Raises:
        KernelInputError: if the model is another one, its projections are quantised, or transformers calls its parts
            in another way; inside the block also for packed sequences, ready-made masks or ones with gaps, and
            attention dropout.
        RuntimeError: if the model runs on the kernels already, or something else has replaced an indexer's forward.
    """
    config: Any = model.config
    check_transformers()
    rope = INDEXER_ROPES.get(config.model_type)
    if rope is None:
        raise KernelInputError(f"model_type is {config.model_type}, expected one of {', '.join(INDEXER_ROPES)}")
    if config._attn_implementation == NAME:
        raise RuntimeError("this model runs on the kernels already; leave the first `with` block before")
    decoder: Any = model.model
    attentions = [layer.self_attn for layer in decoder.layers]
    for attention in attentions:
        if attention.indexer is not None and "forward" in attention.indexer.__dict__:
            raise RuntimeError("an indexer's forward is replaced already; expected use_kernels before what does that")
        weight = attention.kv_b_proj.weight
        if not weight.dtype.is_floating_point or weight.dtype.itemsize < 2:
            raise KernelInputError(f"kv_b_proj is {weight.dtype}, expected float32, bfloat16 or float16")
    changes: list[tuple[Any, str, Any]] = []
    for attention in attentions:
        changes += [(attention, "expand_kv", keep_latent), (attention, _ATTEND, partial(attend, backend=backend))]
        if attention.indexer is not None:
            changes.append((attention.indexer, "forward", _indexer_forward(attention.indexer, rope, backend)))
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        with replaced(*changes):
            yield
    finally:
        config._attn_implementation = before


def key_ranges(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor:
    """Return first key and one past the last of each query instead of a mask: `[batch, 1, queries, 2]`, int32."""
    unknown = sorted(others.keys() - _NOT_OF_RANGES)
    if unknown:  # it might change what a query sees
        raise KernelInputError(
            f"transformers {transformers.__version__} makes masks of {unknown[0]}, expected {TESTED}"
        )
    if mask_function is not causal_mask_function:
        raise KernelInputError("sequences are packed or the mask is a custom one, expected causal sequences")
    if kv_offset:
        raise KernelInputError("the cache has dropped keys, expected one that keeps all")
    ends = (q_offset + torch.arange(1, q_length + 1, device=device)).expand(batch_size, -1)
    starts = torch.zeros_like(ends)
    if attention_mask is not None:
        seen = attention_mask[:, :kv_length]
        count, first = seen.sum(dim=1, keepdim=True), seen.int().argmax(dim=1, keepdim=True)
        positions = torch.arange(seen.shape[1], device=seen.device)
        if not torch.equal(seen, (positions >= first) & (positions < first + count)):
            raise KernelInputError("the attention mask has gaps, expected padding on one side or both")
        starts, ends = first.expand(-1, q_length), torch.minimum(ends, first + count)
    return torch.stack([starts, ends], dim=-1).int()[:, None]


def keep_latent(kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Return latent and rotary part, which hold keys and values of all heads, and an empty tensor."""
    latent = torch.cat([kv_nope, k_rot], dim=-1)
    return latent, latent[..., :0]


def _indexer_forward(
    indexer: Any, rope: Callable[..., tuple[Tensor, Tensor]], backend: Backend
) -> Callable[..., Tensor]:
    def compute(
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None,
        cache: Any,
    ) -> Tensor:
        if attention_mask.dtype != torch.int32:
            raise KernelInputError(f"the mask is a ready-made one of {attention_mask.dtype}, expected none or a 2D one")
        q, k, weights = index_vectors(indexer, rope, hidden_states, q_resid, position_embeddings)
        if cache is not None:
            k = cache.update_indexer(k, indexer.layer_idx)
        return select(q, k, weights, attention_mask, indexer.index_topk, backend)

    return indexer_forward(compute)


def index_vectors(
    indexer: Any,
    rope: Callable[..., tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute queries, keys and weights of a lightning indexer as its own forward does, but with gradients.

    Args:
        indexer: one of a transformers DSA model.
        rope: how its model type rotates, see `INDEXER_ROPES`.
        hidden_states: `[batch, length, hidden]`.
        q_resid: `[batch, length, q_lora_rank]`.
        position_embeddings: cosine and sine.

    Returns:
        Queries `[batch, length, heads, dim]`, keys `[batch, length, dim]`, and the weights of the heads
        `[batch, length, heads]`, in float32 or wider, with all scales in them.
    """
    batch, length, _ = hidden_states.shape
    sizes = [indexer.qk_rope_head_dim, indexer.head_dim - indexer.qk_rope_head_dim]
    q_rot, q_pass = indexer.wq_b(q_resid).view(batch, length, indexer.n_heads, -1).split(sizes, dim=-1)
    k_rot, k_pass = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2).split(sizes, dim=-1)
    q_rot, k_rot = rope(q_rot, k_rot, *position_embeddings, unsqueeze_dim=2)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype))
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32)) * (
        indexer.n_heads**-0.5 * indexer.softmax_scale  # positive, so it may stand behind the ReLU
    )
    return torch.cat([q_rot, q_pass], dim=-1), torch.cat([k_rot.squeeze(2), k_pass.squeeze(2)], dim=-1), weights


def select(q: Tensor, k: Tensor, weights: Tensor, ranges: Tensor, topk: int, backend: Backend) -> Tensor:
    """Select the keys with the highest index scores, `[batch, queries, k]`, int32, -1 for none.

    Args:
        q: `[batch, queries, heads, dim]`, like `k` and `weights` of `index_vectors`.
        k: `[batch, keys, dim]`.
        weights: `[batch, queries, heads]`.
        ranges: first keys and ends, `[batch, queries, 2]`, of `key_ranges`.
        topk: how many; fewer where there are fewer keys.
        backend: see `indexcache_kernels.indexer_topk`.
    """
    first = first_keys(k)
    starts, ends = (ranges + first).flatten(0, 1).unbind(dim=1)
    queries, keys = q.flatten(0, 1), k.flatten(0, 1).to(q.dtype)
    topk = min(topk, k.shape[1])
    indices = indexer_topk(queries, keys, weights.flatten(0, 1), starts=starts, ends=ends, topk=topk, backend=backend)
    indices = indices.view(*q.shape[:2], topk)
    return indices if len(indices) == 1 else torch.where(indices < 0, indices, indices - first)


def first_keys(k: Tensor) -> Tensor:
    """Return where the keys of each sequence begin, one sequence behind the other: `[batch, 1, 1]`, int32."""
    return torch.arange(k.shape[0], dtype=torch.int32, device=k.device)[:, None, None] * k.shape[-2]


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as an attention function of transformers; see `attend_latent`."""
    if dropout:
        raise KernelInputError(f"attention dropout is {dropout}, expected 0")
    return attend_latent(module, query, key, indices, scaling, getattr(module, _ATTEND)), None


def attend_latent(
    module: Any,
    query: Tensor,
    key: Tensor,
    indices: Tensor,
    scaling: float,
    attend: Attend,
) -> Tensor:
    """Attend to selected keys by absorbed MLA, a block of queries at a time.

    Args:
        module: the attention, for the two halves of its `kv_b_proj`.
        query: `[batch, heads, queries, nope + rope]`.
        key: `[batch, 1, keys, latent + rope]`, of `keep_latent`.
        indices: `[batch, queries, k]`, -1 for none.
        scaling: what products of queries and keys are multiplied by.
        attend: called for each block with absorbed queries `[rows, heads, dim]`, all keys `[batch x keys, 1, dim]`,
            the dimensions of a value, rows of those keys `[rows, k]`, and `scaling`.

    Returns:
        `[batch, queries, heads, value]`.
    """
    nope, (w_k, w_v) = module.qk_nope_head_dim, halves(module)
    keys = key[:, 0].flatten(0, 1)[:, None]
    chosen = indices if len(indices) == 1 else torch.where(indices < 0, indices, indices + first_keys(key[:, 0]))
    queries, chosen = query.transpose(1, 2).flatten(0, 1), chosen.flatten(0, 1)
    parts: list[Tensor] = []
    # Split, not sliced: the gradient of a slice has the size of the whole.
    for rows, taken in zip(torch.split(queries, ROWS), torch.split(chosen, ROWS), strict=True):
        absorbed = absorb(rows, w_k, nope)
        with torch.autocast(query.device.type, enabled=False):
            latent, _ = attend(absorbed, keys, module.kv_lora_rank, taken, scaling)
        parts.append(torch.einsum("thc,hdc->thd", latent, w_v))
    return torch.cat(parts).view(*indices.shape[:2], module.num_heads, module.v_head_dim)


def halves(module: Any) -> tuple[Tensor, Tensor]:
    """Split `kv_b_proj` into the halves for keys and values, `[heads, nope, latent]` and `[heads, value, latent]`."""
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    w_k, w_v = module.kv_b_proj.weight.view(module.num_heads, sum(sizes), module.kv_lora_rank).split(sizes, dim=1)
    return w_k, w_v


def absorb(queries: Tensor, w_k: Tensor, nope: int) -> Tensor:
    """Absorb `w_k` into queries `[rows, heads, nope + rope]`: `[rows, heads, latent + rope]`, for latent keys."""
    return torch.cat([torch.einsum("thd,hdc->thc", queries[..., :nope], w_k), queries[..., nope:]], dim=-1)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, key_ranges)
