"""The functions of SGLang that this plugin replaces, or that call them, as they were read: a digest for each version.

What takes the place of a method relies on more than its name and parameters: on which rows it gets, in which order, and
what its callers do with the result. So a source that nobody has read is refused by name. Whoever reads a new version
runs `python -m scripts.tools.read_sources VERSION`, compares what it shows, and adds the digest here.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256


def digest(source: str) -> str:
    """Return the digest of a definition's source text, decorators included, without spaces at ends of lines."""
    return sha256("\n".join(line.rstrip() for line in source.splitlines()).encode()).hexdigest()[:16]


MISSING = digest("")  # of a function that versions do not have

RAN = ("0.5.17", "0.5.23")
"""The versions that patterns were served with; others are judged by what their source has."""


def never_run(version: str) -> str | None:
    """Return one line for a version of SGLang that no pattern was ever served with, or `None`."""
    if version.partition("+")[0] in RAN:
        return None
    return f"patterns were never run on SGLang {version}, only on {' and '.join(RAN)}"


READ: dict[str, Mapping[str, str]] = {
    "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer._get_topk_ragged": {
        "c2934dc18b77258d": "0.5.17 to 0.5.19",
        "baf9c1c74e39602b": "0.5.20",
        "0a7e9e83e89ca292": "0.5.21",
        "f85d3447388f441a": "0.5.22",
        "86cb2052d2e1f948": "0.5.23",
    },
    "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda": {
        "497cd8d1fe99f14e": "0.5.17 to 0.5.19",
        "39309772c5ff5b80": "0.5.20",
        "7975e1bf89db3531": "0.5.21",
        "442056bcecd0c111": "0.5.22",
        "000615b747c672be": "0.5.23",
    },
    "sglang.srt.layers.attention.dsa.dsa_prefill_cuda_graph.pcg_dsa_indexer_prefill_split": {
        "6cf25ae2d4ed7b87": "0.5.17 to 0.5.22",
        "6f92cfd3d7ed0dcc": "0.5.23",
    },
    "sglang.srt.layers.attention.dsa.dsa_indexer_metadata.DSAIndexerMetadata.topk_transform": {
        "5d98708fd3299112": "0.5.17 to 0.5.23",
    },
    "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend.forward_extend": {
        "70cdc9bc500b3ddb": "0.5.17 to 0.5.19",
        "a705e67b67261ed9": "0.5.20",
        "3f41f5523a7d5e0c": "0.5.21",
        "1049c86b7d78d23e": "0.5.22",
        "5aae99e178bf086b": "0.5.23",
    },
    "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_flashmla_sparse": {
        "84b900aaf84f6696": "0.5.17 to 0.5.19",
        "870d66920f685572": "0.5.20 to 0.5.22",
        "500c7e8aa8224e34": "0.5.23",
    },
    "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_triton_sparse_mla": {
        MISSING: "0.5.17 to 0.5.21, which have none",
        "29e4859f40ead4fe": "0.5.22 to 0.5.23",
    },
    "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._cal_indexer_k_start_end": {
        "b5ed9427bc19c06b": "0.5.17",
        "e6e02250c0058331": "0.5.23",
    },
    "sglang.srt.layers.cp.interleave.InterleaveCPStrategy._interleave_shard": {
        "bf48214d0b005b3b": "0.5.17, 0.5.23",
    },
    "sglang.srt.layers.attention.dsv4.indexer.C4Indexer.forward": {
        "b12d6812dc59737e": "0.5.12 to 0.5.12.post1",
        "fd32abf2e09e1775": "0.5.13 to 0.5.22",
        "1fb1991968750c2a": "0.5.23",
    },
}
"""By dotted path of the function: digests, and the versions of SGLang that have it; `MISSING` for those without it.

Other packages add their own.
"""
