"""The functions of SGLang that backends of dense models replace: see `sglang_indexcache.sglang.read_sources`."""

from __future__ import annotations

READ = {
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode": {
        "678899f80451bb42": "0.5.15 to 0.5.23",
    },
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend": {
        "20ccf37226af9ec8": "0.5.15 to 0.5.23",
    },
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.forward_decode": {
        "41f39221f33c7423": "0.5.15 to 0.5.15.post1",
        "7c0b209531d656a9": "0.5.16 to 0.5.21",
        "bb6f7694f5468594": "0.5.22 to 0.5.23",
    },
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.forward_extend": {
        "7d6e5f9c667fe2b5": "0.5.15 to 0.5.15.post1",
        "b4b636aceef68a30": "0.5.16 to 0.5.17",
        "6d13f66cc370534f": "0.5.18 to 0.5.19",
        "ecc28f11287cd397": "0.5.20 to 0.5.21",
        "40d8876e7e4964ff": "0.5.22 to 0.5.23",
    },
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.init_forward_metadata": {
        "192f2551030f9c4b": "0.5.15 to 0.5.15.post1",
        "d1efcc00e8d9525a": "0.5.16 to 0.5.18",
        "0fcf084616d90dfd": "0.5.19",
        "15cfea1841e87b4c": "0.5.20 to 0.5.21",
        "46e244425899781f": "0.5.22 to 0.5.23",
    },
    "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.init_forward_metadata_out_graph": {
        "aa3aa0eae7331e19": "0.5.15 to 0.5.15.post1",
        "75e395d0894d1b50": "0.5.16 to 0.5.18",
        "0d6f7ecc3c852edc": "0.5.19",
        "9ef57e967bacace4": "0.5.20 to 0.5.21",
        "b124b8b305bd4961": "0.5.22",
        "245415dc49c8f7ee": "0.5.23",
    },
    "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_decode": {
        "1e0612fd133cbd87": "0.5.21",
        "ee15604594162fb1": "0.5.22 to 0.5.23",
    },
    "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend": {
        "136088e20629e5ac": "0.5.21",
        "569e7e12d1595808": "0.5.22",
        "ed04397bce383e32": "0.5.23",
    },
}
