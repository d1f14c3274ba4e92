"""What SGLang must have so that layers of DSA models select for blocks of prompt queries."""

from __future__ import annotations

from sglang_indexcache.probes import Feature, Need

METHOD = "_get_topk_ragged"
_MODULE = "srt.layers.attention.dsa."

RAGGED = Need(
    _MODULE + "dsa_indexer",
    "Indexer." + METHOD,
    ("enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata", "topk_result"),
    ("get_indexer_kvcache_range", "get_seqlens_expanded", "get_token_to_batch_idx", "topk_transform", "attn_metadata"),
)
TRANSFORM = Need(
    _MODULE + "dsa_indexer_metadata",
    "DSAIndexerMetadata.topk_transform",
    ("ks", "cu_seqlens_q", "ke_offset", "batch_idx_list", "topk_indices_offset_override"),
    ("force_unfused_topk", "topk_transform_method"),
)
TOPK = Need(_MODULE + "dsa_topk_backend", "DSATopKBackend.topk_func", ("score", "lengths", "topk", "row_starts"))
BLOCKS = Feature(
    "blocks",
    "F layers of DSA models that select for blocks of prompt queries",
    (RAGGED, TRANSFORM, TOPK),
    "no server for patterns with +6q16",
)
