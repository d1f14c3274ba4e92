"""SGLang's functions whose tables are written, and all that read them: see `sglang_indexcache.sglang.read_sources`."""

from __future__ import annotations

from collections.abc import Mapping

READ: dict[str, Mapping[str, str]] = {
    "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.__init__": {
        "b38df097dde235c2": "0.5.23",
    },
    "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.init_forward_metadata_out_graph": {
        "7860e67f89324298": "0.5.23",
    },
    "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.forward_extend": {
        "dbf000f339e1727a": "0.5.23",
    },
    "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.forward_decode": {
        "98f092e3a991382b": "0.5.23",
    },
    "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse.minimax_sparse_prefill": {
        "246603e55f9017ee": "0.5.23",
    },
    "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse.minimax_sparse_decode": {
        "b6b759ffe1406556": "0.5.23",
    },
    "sglang.srt.models.minimax_m3.MiniMaxM3Attention.maybe_build_fused_qkv_index": {
        "2f326a87337ee580": "0.5.23",
    },
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper": {
        "1ae51af9281dae77": "0.5.23",
    },
    "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxHybridAttnBackend.__init__": {
        "3f7f671dbf24c367": "0.5.23",
    },
}
