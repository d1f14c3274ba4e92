"""Kernels of one prompt by kind, from SGLang's profiler."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

KINDS = (  # the first that is found in a kernel's name
    ("scores", "mqa_logits"),
    ("blocks", "_mean_kernel|_lowest_kernel|_expand_kernel"),
    ("top-k", "topk|top_k"),
    ("indexer", "indexer|index_k|get_k_and_s|_get_k|hadamard"),
    ("attention", "sparse|mla|splitkv|flash_fwd|_add_own"),
    ("gather", "all_?gather"),
    ("reduce", "nccl|all_reduce|cross_device"),
    ("products", "nvjet|gemm|cutlass|cublas|splitk"),
)


def kernels(engine: Any, ids: list[int]) -> dict[str, Any]:
    """Return milliseconds of the first rank's kernels of one prompt by kind, their number, and the longest ones."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
        engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 1, "ignore_eos": True})
        engine.stop_profile()
        time.sleep(1)
        kinds: dict[str, float] = defaultdict(float)
        names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        spans = []
        for path in sorted(Path(folder).rglob("*trace.json*"))[:1]:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            for event in json.loads(content)["traceEvents"]:
                if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
                    continue
                name, took = event["name"], event["dur"] / 1e3
                kind = next((kind for kind, words in KINDS if re.search(words, name, re.IGNORECASE)), "rest")
                kinds[kind] += took
                names[name[:100]][0] += took
                names[name[:100]][1] += 1
                spans.append((event["ts"], event["ts"] + event["dur"], name[:60]))
    spans.sort()
    gaps = [((later[0] - earlier[1]) / 1e3, earlier[2], later[2]) for earlier, later in pairwise(spans)]
    idle = sum(max(0.0, gap) for gap, _, _ in gaps)
    longest = sorted(names.items(), key=lambda item: -item[1][0])[:25]
    return {
        "total_ms": round(sum(kinds.values()), 1),
        "idle_ms": round(idle, 1),
        "launches": len(spans),
        "kinds": {kind: round(took, 1) for kind, took in kinds.items()},
        "gaps": [[round(gap, 2), before, after] for gap, before, after in sorted(gaps, reverse=True)[:15]],
        "longest": [[name, round(took, 2), int(count)] for name, (took, count) in longest],
    }
