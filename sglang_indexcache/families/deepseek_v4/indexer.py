"""SGLang's C4 indexers: an S layer's does nothing, and its attention reads what the last one chose.

`DSV4AttnMetadata.c4_sparse_page_indices` is made once a forward pass; each `C4Indexer` writes its choice into it, and
the attention of its layer reads it. Slots in the pool are the same for all layers (one `c4_out_loc`), so nothing is
translated. Every caller goes through the module's `forward`: prefill, decode, several streams. Read:
sglang/srt/models/deepseek_v4.py, layers/attention/deepseek_v4_backend.py and dsv4/indexer.py of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.deepseek_v4.schedule import CHOOSING_RATIO
from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.probes import Need

_OWN_SHARING = ("index_topk_pattern", "index_topk_freq", "indexer_types", "skip_topk")

ATTENTION = Need("srt.models.deepseek_v4", "MQALayer", mentions=("indexer", "compress_ratio"), without=_OWN_SHARING)
INDEXER = Need(
    "srt.layers.attention.dsv4.indexer", "C4Indexer.forward", ("forward_batch",), ("forward_c4_indexer",), _OWN_SHARING
)
BUFFER = Need("srt.layers.attention.deepseek_v4_backend", "DSV4AttnMetadata.c4_sparse_page_indices")
STAGES = Need("srt.models.deepseek_v4", "DeepseekV4Model.forward", ("pp_proxy_tensors",))
NEEDS = (ATTENTION, INDEXER, BUFFER)

_LETTERS = "_indexcache_letters"


class Shared:
    """In the place of a `C4Indexer.forward`: leaves the buffer as the last F layer wrote it."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever a version of SGLang passes."""


def modules(model: Any) -> Iterator[tuple[int, Any]]:
    """The C4 indexers of this rank by letter, lowest layer first; draft models have none."""
    indexers = [module for module in model.modules() if type(module).__name__ == "C4Indexer"]
    if not indexers:
        return
    ratios = model.config.compress_ratios[: model.config.num_hidden_layers]
    layers = [layer for layer, ratio in enumerate(ratios) if ratio == CHOOSING_RATIO]
    for module in sorted(indexers, key=lambda module: module.layer_id):
        if module.layer_id not in layers:
            raise ProofError(f"layer {module.layer_id} of the loaded model has an indexer, its configuration says none")
        site = layers.index(module.layer_id)
        layers[site] = -1  # each once
        yield site, module


def role(site: int, module: Any) -> str:
    """What the indexer would do.

    Raises:
        ProofError: if its `forward` is neither its class's nor ours.
    """
    forward = module.__dict__.get("forward")
    if forward is not None and not isinstance(forward, Shared):
        raise ProofError(f"the indexer of letter {site} runs another forward: {type(forward).__name__}")
    return FULL if forward is None else SHARED


def switch(runner: Any, pattern: Pattern) -> None:
    """Write the roles of this rank's layers."""
    for site, module in modules(runner.model):
        if pattern[site] == SHARED:
            module.forward = Shared()
        elif role(site, module) == SHARED:
            del module.forward
    setattr(runner, _LETTERS, pattern.roles)


def configured(runner: Any) -> str:
    """The letters that were written last; there is no configuration of them."""
    return str(getattr(runner, _LETTERS, ""))
