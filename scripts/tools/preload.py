"""Imported once by the fork server: what is slow and the same for all, and nothing that reads the environment.

Where there is no GPU, Triton's interpreter is on meanwhile: drafts and contexts run kernels, and all else runs none.
"""

import os
from importlib import import_module

import torch

from sglang_indexcache.sglang.probes import FEATURES, SglangSource

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
for module in ("benchmark.one_batch", "srt.entrypoints.http_server", "srt.models.registry"):
    import_module(f"sglang.{module}")
if not torch.cuda.is_available():
    del os.environ["TRITON_INTERPRET"]
if source := SglangSource.installed():
    for feature in FEATURES:
        source.refusal(feature)
