"""Make SGLang run a pattern on DeepSeek-V4: an S layer's indexer does nothing, its attention reads the last selection.

SGLang makes `DSV4AttnMetadata.c4_sparse_page_indices` once for each forward pass. Each `C4Indexer` writes its selection
into it, and the attention of its layer reads it. Slots in the pool are the same for all layers (one `c4_out_loc`), so
nothing is translated. Every caller goes through the module's `forward`: prefill, decode, several streams. Read:
sglang/srt/models/deepseek_v4.py, layers/attention/deepseek_v4_backend.py and dsv4/indexer.py of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from sglang_indexcache.families.base import SglangAdapter
from sglang_indexcache.families.deepseek_v4.schedule import CHOOSING_RATIO
from sglang_indexcache.io.errors import ProofError, SpellingError
from sglang_indexcache.pattern import FULL, SHARED, Pattern
from sglang_indexcache.sglang.attention import CountedAttention, exactly
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import Feature, Need

_SCHEDULE_KEYS = ("compress_ratios", "compress_rates", "layer_types", "num_hidden_layers", "index_topk")
_SHARING_KEYS = ("index_topk_pattern", "index_topk_freq", "indexer_types")
_OWN_SWAPS = "its buffer holds slots of one layer, which S layers can't use"
_UNTRIED = "context parallelism was never tried with one on DeepSeek-V4"
_OWN_SHARING = ("index_topk_pattern", "index_topk_freq", "indexer_types", "skip_topk")

ATTENTION = Need("srt.models.deepseek_v4", "MQALayer", mentions=("indexer", "compress_ratio"), without=_OWN_SHARING)
INDEXER = Need(
    "srt.layers.attention.dsv4.indexer", "C4Indexer.forward", ("forward_batch",), ("forward_c4_indexer",), _OWN_SHARING
)
BUFFER = Need("srt.layers.attention.deepseek_v4_backend", "DSV4AttnMetadata.c4_sparse_page_indices")
STAGES = Need("srt.models.deepseek_v4", "DeepseekV4Model.forward", ("pp_proxy_tensors",))
_NEEDS = (ATTENTION, INDEXER, BUFFER)

_LETTERS = "_indexcache_letters"


def keep_selection(*args: Any, **kwargs: Any) -> None:
    """Leave the buffer as the last F layer wrote it, in place of `C4Indexer.forward`, whatever it is called with."""


class DeepseekV4Sglang(SglangAdapter):
    """An adapter that writes the roles once SGLang has loaded the model."""

    serving = Feature(
        "deepseek_v4", "patterns of F and S on DeepSeek-V4", _NEEDS, "no server for DeepSeek-V4", (INDEXER,)
    )
    pipeline: ClassVar[Feature | None] = Feature(
        "pipeline (V4)",
        "pipeline stages of DeepSeek-V4, each beginning with an F",
        (STAGES,),
        "no server with pipeline parallelism",
    )
    begins_every_stage = True
    place = "letter"
    prompt_graphs_since = None
    fp8_on_blackwell = False
    refused_flags: ClassVar[Mapping[str, str]] = {
        "enable_hisparse": _OWN_SWAPS,
        "enable_return_indexer_topk": "S layers have no indices of their own to return",
        "enable_prefill_cp": _UNTRIED,
        "attn_cp_size": _UNTRIED,
        "dcp_size": _UNTRIED,
    }

    def to_overrides(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        """See `SglangAdapter.to_overrides`."""
        pattern.check_plain("is not served yet")
        for key in _SCHEDULE_KEYS:
            if key in overrides:
                raise SpellingError(f"{FLAG}: {key} changes which layers choose; expected a file made for that model")
        for key in _SHARING_KEYS:
            if key in overrides:
                raise SpellingError(f"{FLAG}: {key} is not read on DeepSeek-V4; expected the pattern file alone")
        self.checkpoint.check_overrides(overrides)
        return dict(overrides)

    def loaded(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.loaded`."""
        self.switch(runner, pattern)

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        """See `SglangAdapter.modules`; the C4 indexers, lowest layer first."""
        indexers = [module for module in model.modules() if type(module).__name__ == "C4Indexer"]
        if not indexers:
            return
        ratios = model.config.compress_ratios[: model.config.num_hidden_layers]
        layers = [layer for layer, ratio in enumerate(ratios) if ratio == CHOOSING_RATIO]
        for module in sorted(indexers, key=lambda module: module.layer_id):
            if module.layer_id not in layers:
                raise ProofError(
                    f"layer {module.layer_id} of the loaded model has an indexer, its configuration says none"
                )
            site = layers.index(module.layer_id)
            layers[site] = -1  # each once
            yield site, module

    def role(self, site: int, module: Any) -> str:
        """See `SglangAdapter.role`."""
        forward = module.__dict__.get("forward")
        if forward not in (None, keep_selection):
            raise ProofError(f"the indexer of letter {site} runs another forward: {type(forward).__name__}")
        return FULL if forward is None else SHARED

    def indexer(self, module: Any) -> Any:
        """See `SglangAdapter.indexer`."""
        return module

    def attentions(self, model: Any, pattern: Pattern, draft: bool) -> Iterator[CountedAttention]:
        """See `SglangAdapter.attentions`; an indexer that runs projects its queries, and drafts have none.

        Graphs of prompts hold all that an indexer does: `C4Indexer.forward` and the backend's `forward_c4_indexer` are
        captured, and between their parts a replay calls the attention alone (`bcg_deepseek_v4_attention_with_output`;
        read in 0.5.17 and 0.5.23). What is captured does not depend on the prompt's length.
        """
        around = {id(child): module for module in model.modules() for child in module.children()}
        for site, module in () if draft else self.modules(model):
            allowed = exactly(int(pattern[site] == FULL))
            yield CountedAttention(site, around[id(module)], module.wq_b, allowed, in_graphs=True)

    def switch(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.switch`."""
        for site, module in self.modules(runner.model):
            if pattern[site] == SHARED:
                module.forward = keep_selection
            elif self.role(site, module) == SHARED:
                del module.forward
        setattr(runner, _LETTERS, pattern.roles)

    def configured(self, runner: Any) -> str:
        """See `SglangAdapter.configured`."""
        return str(getattr(runner, _LETTERS, ""))  # no configuration has them
