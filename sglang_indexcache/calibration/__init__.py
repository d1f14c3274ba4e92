"""Calibration mode: a server on which a search switches the pattern between evaluations.

It starts with every layer F (the checkpoint's own schedule where layers are locked), without what would remember an
earlier pattern: prefix caches and CUDA graphs. Switching is a few attribute writes a layer, on all ranks, through a
control request that SGLang already fans out. A server in serving mode has none of this.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from sglang_indexcache import probes
from sglang_indexcache.calibration.control import Controller
from sglang_indexcache.calibration.divergence import Divergence, limit_gb
from sglang_indexcache.calibration.lm_head import around_logits
from sglang_indexcache.calibration.overlap import Overlap
from sglang_indexcache.calibration.preflight import Calibration
from sglang_indexcache.calibration.route import add_route
from sglang_indexcache.calibration.selections import Selections
from sglang_indexcache.hooks import Hooks, installed_source
from sglang_indexcache.serving import proof


def install() -> None:
    """Register the hooks of calibration mode; what this SGLang can't measure is refused when it is asked for.

    Raises:
        SglangError: if this SGLang lacks what switching needs.
    """
    source = installed_source((*probes.REQUIRED, probes.CALIBRATE))
    os.environ["SGLANG_DSA_TOPK_BROADCAST"] = "1"  # all tensor-parallel ranks attend to what the first one selected
    hooks, calibration = Hooks(), Calibration(source)
    hooks.guard(probes.SERVER_ARGS, probes.MODEL_CONFIG, probes.LOAD_MODEL, probes.READY)
    hooks.before(probes.SERVER_ARGS, calibration.server_args)
    hooks.before(probes.MODEL_CONFIG, calibration.model_config)
    hooks.after(probes.NEW_MODEL, proof.preparer(calibration))
    proven = proof.Proven()
    hooks.after(probes.LOAD_MODEL, proof.prover(calibration, proven))
    hooks.after(probes.READY, lambda info, *_, **__: info.update(indexcache=proven.proof.status("calibration")))
    divergence = overlap = selections = None
    if source.refusal(probes.DIVERGENCE) is None:
        divergence = Divergence(limit_gb())
        hooks.around(probes.LOGPROBS, divergence.around_logprobs)
    if source.missing(probes.LOGITS) is None:  # one hook: SGLang warns of two around the same place
        hooks.around(probes.LOGITS, around_logits(divergence))
    if source.refusal(probes.SAMPLING) is None:
        overlap, selections = Overlap(), Selections(calibration)
        hooks.before(probes.FORWARD, partial(_before_forward, overlap, selections))
    hooks.around(probes.CONTROL, Controller(calibration, divergence, overlap, selections).handle)
    hooks.before(probes.HTTP, add_route)


def _before_forward(overlap: Overlap, selections: Selections, *args: Any, **kwargs: Any) -> None:
    """One hook for both."""
    overlap.before_forward(*args, **kwargs)
    selections.before_forward(*args, **kwargs)
