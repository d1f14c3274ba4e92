"""Name what this room changes and relies on in SGLang, with digests of the source that was read: 0.5.23 alone.

Index keys of a layer are written and read by its indexer alone. Host pool, swap-in, staging and retraction
(`HiSparseCoordinator`) move KV and no index keys; there are no prefix hits, since HiSparse asks for
`--disable-radix-cache`. Prefill and decode servers pair index keys layer by layer, and leave out a layer that has none
on either side (`is_elided_entry`, in Mooncake, NIXL and MORI); a prefill server has no HiSparse, and gives S layers
none by itself.
"""

from __future__ import annotations

from indexcache_lab.unread import first_unread
from sglang_indexcache.sglang.probes import Feature, Need, SglangSource

POOL = "HiSparseDSATokenToKVPool"
_BUILDER, _SIZES = "srt.mem_cache.kv_cache_configurator", "srt.model_executor.pool_configurator"
DECIDES = Need(_BUILDER, "_should_elide_dsa_index_k", ("is_draft_worker",), closed=True)
BUILDS = Need(
    _BUILDER,
    "KVCacheConfigurator._build_dsa_kv_pool",
    ("max_total_num_tokens", "max_running_requests", "dsa_pool_class"),
    ("skip_topk_layers", "enable_hisparse"),
    closed=True,
)
COUNTS = Need(
    _SIZES,
    "DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
    ("kvc", "num_layers", "allocate_all_layers"),
    closed=True,
)
SKIPS = Need("srt.configs.model_config", "dsa_layer_skips_topk", ("config", "layer_id"), closed=True)
ALLOCATES = Need("srt.model_executor.model_runner", "ModelRunner.alloc_memory_pool")
HISPARSE_POOL = Need(
    "srt.mem_cache.hisparse_memory_pool", f"{POOL}.__init__", ("skip_topk_layers", "host_to_device_ratio")
)

FREED = Feature(
    "freeing index keys",
    "HiSparse without index keys of S layers",
    (DECIDES, BUILDS, COUNTS, SKIPS, ALLOCATES, HISPARSE_POOL),
    "HiSparse keeps them",
    (
        *(DECIDES, BUILDS, COUNTS, SKIPS, ALLOCATES),
        Need(_SIZES, "DefaultPoolConfigurator.__init__"),
        Need(_SIZES, "DefaultPoolConfigurator._compute_cell_size"),
        Need(_SIZES, "_get_dsa_cache_layer_ids"),
        Need("srt.mem_cache.hisparse_memory_pool", POOL),
        Need("srt.mem_cache.memory_pool", "DSATokenToKVPool"),
        Need("srt.mem_cache.index_key_cache", "IndexKeyCache"),
        Need("srt.managers.hisparse_coordinator", "HiSparseCoordinator"),
        Need("srt.disaggregation.utils", "is_elided_entry"),
        Need("srt.disaggregation.utils", "setup_state_kv_args"),
    ),
)

READ = {  # dotted path below `sglang.`: digest, version
    f"{_BUILDER}._should_elide_dsa_index_k": {"223aa25562cc884d": "0.5.23"},
    f"{_BUILDER}.KVCacheConfigurator._build_dsa_kv_pool": {"42a6b69ff98495b4": "0.5.23"},
    f"{_SIZES}.DefaultPoolConfigurator._compute_dsa_indexer_cell_size": {"07d85366ea5935d8": "0.5.23"},
    f"{_SIZES}.DefaultPoolConfigurator.__init__": {"5fead0dd77a7a850": "0.5.23"},
    f"{_SIZES}.DefaultPoolConfigurator._compute_cell_size": {"6801285e71bf38ce": "0.5.23"},
    f"{_SIZES}._get_dsa_cache_layer_ids": {"44cdf717f566b37a": "0.5.23"},
    "srt.configs.model_config.dsa_layer_skips_topk": {"79d9f089fbb5ed68": "0.5.23"},
    "srt.model_executor.model_runner.ModelRunner.alloc_memory_pool": {"e1365d8ac173496d": "0.5.23"},
    f"srt.mem_cache.hisparse_memory_pool.{POOL}": {"6bc70a50abf1e288": "0.5.23"},
    "srt.mem_cache.memory_pool.DSATokenToKVPool": {"040e0d9497c91232": "0.5.23"},
    "srt.mem_cache.index_key_cache.IndexKeyCache": {"ff9140bf70b587e0": "0.5.23"},
    "srt.managers.hisparse_coordinator.HiSparseCoordinator": {"50a2494b9eedeb86": "0.5.23"},
    "srt.disaggregation.utils.is_elided_entry": {"bc8ac2e0064c08c2": "0.5.23"},
    "srt.disaggregation.utils.setup_state_kv_args": {"3ece7a81a682b170": "0.5.23"},
}


def unread(source: SglangSource) -> str | None:
    """Return one line if a function or class that is relied on is not as it was read, or `None`."""
    return first_unread(source, FREED, READ)
