"""Imported once by the fork server: what is slow and the same for all, and nothing that reads the environment."""

from importlib import import_module

import torch

from sglang_indexcache.sglang.probes import FEATURES, SglangSource

torch.set_num_threads(1)
for module in ("benchmark.one_batch", "srt.entrypoints.http_server", "srt.models.registry"):
    import_module(f"sglang.{module}")
if source := SglangSource.installed():
    for feature in FEATURES:
        source.refusal(feature)
