"""Make SGLang run a pattern on MiniMax-M3: two tables of its attention backend say who chooses and who reuses.

SGLang fills them from a frequency, on AMD's gfx95 alone; they are written anew once the backend is built, before graphs
are captured, and read back from the same. Which function runs then, and what it attends to, is SGLang's own. Read:
sglang/srt/models/minimax_m3.py, layers/attention/minimax_sparse_backend.py, attention_registry.py and
minimax_sparse_ops of 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from indexcache_minimax.family import tables
from sglang_indexcache.families.base import SglangAdapter
from sglang_indexcache.io.errors import ProofError, SpellingError
from sglang_indexcache.io.messages import NOT_COMBINED
from sglang_indexcache.pattern import FULL, Pattern
from sglang_indexcache.sglang.attention import CountedAttention, exactly
from sglang_indexcache.sglang.meaning import DISABLED, Meaning, is_off
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import LOAD_BACKENDS, LOAD_GRAPHS, Feature, Need

_BACKEND = "srt.layers.attention.minimax_sparse_backend"
_OPERATIONS = "srt.layers.attention.minimax_sparse_ops.minimax_sparse"
_WRITTEN = (tables.SWITCH, tables.GROUP_SIZE, tables.SOURCES, tables.GROUPS)
ATTENTION = Need("srt.models.minimax_m3", "MiniMaxM3Attention.__init__", ("layer_id",), ("index_qkv_proj",))
WRAPPER = Need("srt.layers.attention.attention_registry", "attn_backend_wrapper", ("runner",))
HYBRID = Need(_BACKEND, "MiniMaxHybridAttnBackend.__init__", ("sparse_backend", "sparse_layer_ids"))
MADE = Need(_BACKEND, "MiniMaxSparseAttnBackend.__init__", ("runner",), (*_WRITTEN, "disable_value_layer_ids"))
BEGIN = Need(
    _BACKEND, "MiniMaxSparseAttnBackend.init_forward_metadata_out_graph", ("forward_batch",), ("_decode_topk_buf",)
)
PROMPTS = Need(_BACKEND, "MiniMaxSparseAttnBackend.forward_extend", ("layer", "forward_batch"), (tables.GROUPS,))
DECODING = Need(_BACKEND, "MiniMaxSparseAttnBackend.forward_decode", ("layer", "forward_batch"), (tables.SOURCES,))
PREFILL = Need(_OPERATIONS, "minimax_sparse_prefill", ("cached_topk_idx", "return_topk_idx"))
STEP = Need(_OPERATIONS, "minimax_sparse_decode", ("cached_topk_idx", "topk_out"))
FUSED = Need("srt.models.minimax_m3", "MiniMaxM3Attention.maybe_build_fused_qkv_index")
_READ = (MADE, BEGIN, PROMPTS, DECODING, PREFILL, STEP, FUSED, WRAPPER, HYBRID)

_SCHEDULE_KEYS = ("sparse_attention_config", "layer_types", "num_hidden_layers", "text_config", "index_topk_blocks")
_SHARING_KEYS = ("index_topk_pattern", "index_topk_freq", "indexer_types", "use_index_cache")
_UNTRIED = "it was never tried with one on MiniMax-M3"
_PLACE = "indexcache_backend"  # attribute of an attention module: the backend whose tables say what it does


class MinimaxM3Sglang(SglangAdapter):
    """An adapter that writes the tables once SGLang has built its attention backend."""

    serving = Feature(
        "minimax_m3",
        "patterns of F and S on MiniMax-M3",
        (LOAD_BACKENDS, LOAD_GRAPHS, ATTENTION, *_READ),
        "no server for MiniMax-M3",
        _READ,
    )
    place = "letter"
    proven_after: ClassVar[Need] = LOAD_BACKENDS
    shows_indices = False
    fp8_on_blackwell = False
    refused_flags: ClassVar[Mapping[str, str]] = {
        "speculative_algorithm": "drafts are verified as prompts are read, in graphs where nobody ran it",
        "enable_pdmux": "it has an attention backend of its own for every stream",
        "enable_hisparse": "it swaps blocks in by what each layer chose",
        "enable_prefill_cp": _UNTRIED,
        "attn_cp_size": _UNTRIED,
        "dcp_size": _UNTRIED,
        "enable_dp_attention": _UNTRIED,
        "enable_torch_compile": _UNTRIED,
    }

    # -- before SGLang loads the model

    def refused_with(self, pattern: Pattern, arguments: Any) -> Iterator[tuple[str, str]]:
        """See `SglangAdapter.refused_with`: prompts in graphs, which SGLang captures unasked, and servers in halves."""
        meant = Meaning(arguments)
        if meant.device != "cpu" and meant.cuda_graph_backend_prefill != DISABLED:
            given = "--cuda-graph-backend-prefill"
            asked = meant.cuda_graph_backend_prefill or "(by default)"
            yield given, f"{given} {asked} {NOT_COMBINED} on MiniMax-M3: {_UNTRIED}; expected {given} {DISABLED}"
        if not is_off(meant.disaggregation_mode):
            given = "--disaggregation-mode"
            yield given, f"{given} {meant.disaggregation_mode} {NOT_COMBINED} on MiniMax-M3: {_UNTRIED}"

    def to_overrides(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        """See `SglangAdapter.to_overrides`."""
        pattern.check_plain("is not served on MiniMax-M3")
        for key in _SCHEDULE_KEYS:
            if key in overrides:
                raise SpellingError(f"{FLAG}: {key} changes which layers choose; expected a file made for that model")
        for key in _SHARING_KEYS:
            if key in overrides:
                raise SpellingError(f"{FLAG}: {key} is not read on MiniMax-M3; expected the pattern file alone")
        self.checkpoint.check_overrides(overrides)
        return dict(overrides)

    # -- the loaded model, on one rank

    def loaded(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.loaded`; where all choose, SGLang's own tables stay."""
        backend = tables.sparse_backend(runner)
        for _, module in self.modules(runner.model):
            setattr(module, _PLACE, backend)
        if not pattern.is_full:
            self.switch(runner, pattern)

    def captured(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.captured`; graphs hold what the tables said meanwhile, and prompts must have none."""
        prompts = getattr(runner, "prefill_cuda_graph_runner", None)
        if type(prompts).__name__ not in ("NoneType", "EagerRunner") and not pattern.is_full:
            raise ProofError(
                f"prompts were captured by {type(prompts).__name__}, which never ran with a pattern on MiniMax-M3;"
                f" expected --cuda-graph-backend-prefill {DISABLED}"
            )
        self._check(runner, pattern.roles, "when graphs were captured")

    def saved(self, runner: Any) -> Mapping[str, int]:
        """See `SglangAdapter.saved`: nothing, but whoever asks for the state is told if somebody wrote the tables."""
        told = getattr(tables.sparse_backend(runner), tables.TOLD, None)
        if told is not None:
            self._check(runner, told, "by now")
        return {}

    def _check(self, runner: Any, roles: str, when: str) -> None:
        backend, found = tables.sparse_backend(runner), self.configured(runner)
        placed = all(module.__dict__.get(_PLACE) is backend for _, module in self.modules(runner.model))
        if found != roles or not placed:
            what = found if placed else "another attention backend"
            raise ProofError(f"SGLang's tables of who chooses say {what} {when}, the pattern says {roles}")

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        """See `SglangAdapter.modules`; the attention modules that have an index, lowest layer first."""
        found = [item for item in model.modules() if type(item).__name__ == "MiniMaxM3Attention"]
        with_index = (item for item in found if item.is_sparse_attention_layer)
        yield from enumerate(sorted(with_index, key=lambda item: item.attn.layer_id))

    def role(self, site: int, module: Any) -> str:
        """See `SglangAdapter.role`; before the backend is built every layer has an index of its own."""
        backend = module.__dict__.get(_PLACE)
        return FULL if backend is None else tables.role(backend, module.attn.layer_id)

    def indexer(self, module: Any) -> Any:
        """See `SglangAdapter.indexer`."""
        from indexcache_minimax.family.index_calls import IndexBranch

        backend = module.__dict__.get(_PLACE)
        return IndexBranch(module, None if backend is None else backend.topk_blocks * backend.block_size_k)

    def attentions(self, model: Any, pattern: Pattern, draft: bool) -> Iterator[CountedAttention]:
        """See `SglangAdapter.attentions`; S layers write index keys, and call no function that chooses."""
        from indexcache_minimax.family.index_calls import branches

        found = () if draft else tuple(self.modules(model))
        if not found:
            return
        of_layer = branches(found[0][1].__dict__[_PLACE], (module for _, module in found))
        for site, module in found:
            allowed = exactly(int(pattern[site] == FULL))
            yield CountedAttention(site, module, of_layer[module.attn.layer_id], allowed)

    def switch(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.switch`."""
        tables.write(tables.sparse_backend(runner), dict(self.modules(runner.model)), pattern)

    def configured(self, runner: Any) -> str:
        """See `SglangAdapter.configured`; read from the tables, which alone have them."""
        return "".join(self.role(site, module) for site, module in self.modules(runner.model))
