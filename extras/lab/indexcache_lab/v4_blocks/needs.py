"""Name what this room changes and relies on in SGLang, with digests of the source that was read: 0.5.23 alone."""

from __future__ import annotations

from indexcache_lab.unread import first_unread
from sglang_indexcache.sglang.probes import LOAD_GRAPHS, Feature, Need, SglangSource

_INDEXER, _BACKEND = "srt.layers.attention.dsv4.indexer", "srt.layers.attention.deepseek_v4_backend"
SELECTS = Need(
    _INDEXER,
    "C4IndexerBackendMixin.forward_c4_indexer",
    (
        *("x", "q_lora", "c4_indexer", "forward_batch", "alt_streams", "enable_multi_stream", "q_lora_ready"),
        *("skip_compressor", "q_lora_quant"),
    ),
    ("forward_metadata", "match_num_queries"),
    closed=True,
)
PROJECTS = Need(_INDEXER, "C4Indexer.compute_q", ("q_lora", "positions", "weight"))
CALLS = Need(_INDEXER, "C4Indexer.forward", ("x", "q_lora", "forward_batch", "attn_backend"))
OF_INDEXER = Need("srt.layers.attention.dsv4.metadata", "PagedIndexerMetadata")
OF_PASS = Need(_BACKEND, "DSV4Metadata")
OF_ATTENTION = Need(_BACKEND, "DSV4AttnMetadata")

BLOCKS = Feature(
    "blocks (V4)",
    "C4 layers of DeepSeek-V4 that select for blocks of prompt queries",
    (SELECTS, PROJECTS, CALLS, OF_INDEXER, OF_PASS, OF_ATTENTION, LOAD_GRAPHS),
    "every query selects for itself",
    (
        *(SELECTS, PROJECTS, CALLS, OF_INDEXER, OF_PASS, OF_ATTENTION),
        Need(_INDEXER, "C4IndexerBackendMixin._forward_prepare_normal"),
        Need(_INDEXER, "C4IndexerBackendMixin._forward_prepare_multi_stream"),
        Need(_INDEXER, "C4IndexerBackendMixin._get_nonpaged_indexer_plan"),
        Need(_INDEXER, "C4IndexerBackendMixin._can_use_nonpaged_indexer"),
    ),
)

READ: dict[str, dict[str, str]] = {  # dotted path below `sglang.`: digest, version
    f"{_INDEXER}.C4IndexerBackendMixin.forward_c4_indexer": {"f151275d99f51cbb": "0.5.23"},
    f"{_INDEXER}.C4Indexer.compute_q": {"ace066f3c22f77dc": "0.5.23"},
    f"{_INDEXER}.C4Indexer.forward": {"1fb1991968750c2a": "0.5.23"},
    "srt.layers.attention.dsv4.metadata.PagedIndexerMetadata": {"367742c137be9a8e": "0.5.23"},
    f"{_BACKEND}.DSV4Metadata": {"6837cde4ef87ea63": "0.5.23"},
    f"{_BACKEND}.DSV4AttnMetadata": {"3bdb752d55c961e5": "0.5.23"},
    f"{_INDEXER}.C4IndexerBackendMixin._forward_prepare_normal": {"55bce8bcaa0bbd1c": "0.5.23"},
    f"{_INDEXER}.C4IndexerBackendMixin._forward_prepare_multi_stream": {"47d19e30a6f54649": "0.5.23"},
    f"{_INDEXER}.C4IndexerBackendMixin._get_nonpaged_indexer_plan": {"dbb4b08d00f7e6e1": "0.5.23"},
    f"{_INDEXER}.C4IndexerBackendMixin._can_use_nonpaged_indexer": {"72c57d8942e5b41e": "0.5.23"},
}


def unread(source: SglangSource) -> str | None:
    """Return one line if a function or class that is relied on is not as it was read, or `None`."""
    return first_unread(source, BLOCKS, READ)
