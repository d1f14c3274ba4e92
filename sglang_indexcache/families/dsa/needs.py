"""Needs of serving DSA models, and of selecting in blocks."""

from __future__ import annotations

from sglang_indexcache.sglang.probes import LOAD_GRAPHS, Feature, Need

PREFILL = "_get_topk_ragged"  # selects for the queries of prompts
DIRECT = "forward_cuda"  # the indexer, where context-parallel prompts gather keys beside it (`layers/cp/interleave.py`)
DECODING = "_get_topk_paged"  # for those of decoded tokens
_MODULE = "srt.layers.attention.dsa."

ATTENTION = Need(
    "srt.models.deepseek_v2", "DeepseekV2AttentionMLA.__init__", ("layer_id",), ("skip_topk", "next_skip_topk")
)
ROLE_READER = Need(
    "srt.models.deepseek_common.attention_forward_methods.forward_mla",
    "DeepseekMLAForwardMixin",
    mentions=("skip_topk",),
)
ATTENTIONS = (ATTENTION, ROLE_READER)
STAGES = Need("srt.models.deepseek_v2", "DeepseekV2Model.forward", ("pp_proxy_tensors",), ("topk_indices",))
SKIPS = Need("srt.configs.model_config", "dsa_layer_skips_topk", ("config", "layer_id"))
CONFIG_READER = Need(
    "srt.utils.hf_transformers.config", "get_config", ("model", "trust_remote_code", "model_override_args")
)
RULE = Feature("check", "ask SGLang's own rule which layers would run", (SKIPS, CONFIG_READER), "not checked")
RAGGED = Need(
    _MODULE + "dsa_indexer",
    "Indexer." + PREFILL,
    ("enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata", "topk_result"),
    ("get_indexer_kvcache_range", "get_seqlens_expanded", "get_token_to_batch_idx", "topk_transform", "attn_metadata"),
    closed=True,
)
TRANSFORM = Need(
    _MODULE + "dsa_indexer_metadata",
    "DSAIndexerMetadata.topk_transform",
    ("logits", "topk", "ks", "cu_seqlens_q", "ke_offset", "batch_idx_list", "topk_indices_offset_override"),
    ("force_unfused_topk", "topk_transform_method"),
    closed=True,
)
TOPK = Need(_MODULE + "dsa_topk_backend", "DSATopKBackend.topk_func", ("score", "lengths", "topk", "row_starts"))
PAGES = Need("srt.layers.attention.dsa_backend", "DSAMetadata.real_page_table")
PAGE_SIZE = Need("srt.layers.attention.dsa_backend", "DSAMetadata.page_size")
PREFILL_KERNEL = Need(
    "srt.layers.attention.dsa_backend", "DeepseekSparseAttnBackend.__init__", mentions=("dsa_prefill_impl",)
)
EAGER = Need(_MODULE + "dsa_indexer", "Indexer.forward_cuda")
IN_GRAPHS = Need(_MODULE + "dsa_prefill_cuda_graph", "pcg_dsa_indexer_prefill_split")
SELECTING = (RAGGED, EAGER, IN_GRAPHS, TRANSFORM)  # what selects for prompts, and all that calls it
BLOCKS = Feature(
    "blocks",
    "F layers of DSA models that select for blocks of prompt queries",
    (RAGGED, TRANSFORM, TOPK, PAGES, PAGE_SIZE, PREFILL_KERNEL, LOAD_GRAPHS),
    "no server for patterns with +6q16",
    SELECTING,
)
EXTEND = Need(
    "srt.layers.attention.dsa_backend",
    "DeepseekSparseAttnBackend.forward_extend",
    ("q", "k", "layer", "forward_batch", "topk_indices"),
)
SPARSE = tuple(
    Need(
        "srt.layers.attention.dsa_backend",
        f"DeepseekSparseAttnBackend.{kernel}",
        ("q_all", "kv_cache", "v_head_dim", "page_table_1", "sm_scale", "topk_length"),
    )
    for kernel in ("_forward_flashmla_sparse", "_forward_triton_sparse_mla")  # the second from 0.5.22 on
)
GROUPING = Feature(
    "grouping",
    "the queries of a block attend together",
    (EXTEND, SPARSE[0]),
    "each query of a block attends alone",
    (EXTEND, *SPARSE),
)
ATTENTION_GROUP = Need("srt.distributed.parallel_state", "get_attn_tp_group")
SHARDING = Feature(
    "sharding",
    "indexers of DSA models whose rows of prompts are shared out over tensor-parallel ranks",
    (RAGGED, TRANSFORM, ATTENTION_GROUP),
    "no server with --indexcache-shard-indexers",
    SELECTING,
)
CONTEXT_GROUP = Need("srt.distributed.parallel_state", "get_attn_cp_group")
INTERLEAVED = Need("srt.layers.cp.interleave", "InterleaveCPStrategy._interleave_shard", ("input_",))
KEY_RANGES = Need("srt.layers.attention.dsa_backend", "DeepseekSparseAttnBackend._cal_indexer_k_start_end")
CONTEXT = Feature(
    "blocks of contexts",
    "blocks of prompt queries where context parallelism shares out prompts",
    (CONTEXT_GROUP, INTERLEAVED, KEY_RANGES),
    "no server for patterns with +6q16 and --enable-prefill-cp",
    (*SELECTING, INTERLEAVED, KEY_RANGES),
)
