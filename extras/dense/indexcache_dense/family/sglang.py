"""Make SGLang run a pattern on dense models: F and S layers run its decode attention over another page table.

SGLang builds one attention backend a rank; each `RadixAttention` calls it with itself. Once the backend is built, its
class becomes a subclass that decodes F and S layers over the selected pages. Prefill is SGLang's own. Read:
sglang/srt/layers/radix_attention.py, layers/attention/torch_native_backend.py and ModelRunner.init_attention_backends
of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from indexcache_dense.family.backends import BACKENDS, make_backend_class
from indexcache_dense.family.keys import WINDOW_KEYS
from indexcache_dense.reuse import NO_MEMORY
from indexcache_dense.selection import COMPRESSED_KEYS, JOINT, OWN_SCORES, STRIDE, Selection, selection_in
from sglang_indexcache.families.base import SglangAdapter
from sglang_indexcache.families.combination import Combination
from sglang_indexcache.io.errors import ProofError, SpellingError
from sglang_indexcache.pattern import DENSE, FULL, SHARED, Pattern
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import LOAD_BACKENDS, LOAD_GRAPHS, Feature, Need
from sglang_indexcache.sglang.requested import ATTRIBUTE, Request

LAYER = Need("srt.layers.radix_attention", "RadixAttention.__init__", ("layer_id", "sliding_window_size"))
_NEEDS = (LOAD_BACKENDS, LOAD_GRAPHS, LAYER)
KEEPING = Feature(
    "dense_gqa, F",
    "F layers, compressed and rounded keys and reuse policies on Llama, Qwen2, Qwen3 and Mistral",
    (
        *_NEEDS,
        Need("srt.mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer", ("layer", "cache_k", "cache_v")),
        Need("srt.mem_cache.memory_pool", "MHATokenToKVPool.get_key_buffer", ("layer_id",)),
        Need("srt.mem_cache.memory_pool", "ReqToTokenPool.__init__", ("size", "max_context_len"), ("req_to_token",)),
        Need("srt.model_executor.forward_batch_info", "ForwardBatch.req_pool_indices"),
        Need("srt.model_executor.forward_batch_info", "ForwardMode.is_extend"),
    ),
    "no such patterns, only D and S by each step's own attention",
)
_UNTRIED = "it was never tried with one on dense models"
_KEPT_IN_READING = "what it needs of a request is kept as its prompt is read"
_CHOSEN_IN_DECODING = "pages are chosen while single tokens are decoded"

SERVED_POLICIES = ("none", "ema", "refresh")
BACKEND_ATTRIBUTES = ("attn_backend", "decode_attn_backend")  # of a model runner
_COMBINATIONS = (
    Combination(
        "backend of dense attention",
        ("--attention-backend flashinfer, torch_native",),
        "flashinfer: SGLang 0.5.17 on an H100; torch_native: SGLang 0.5.23 on CPUs",
        ("attention_backend",),
        lambda arguments: arguments.attention_backend in ("flashinfer", "torch_native"),
        family="dense_gqa",
    ),
    Combination(
        "pages of 16 tokens",
        ("--page-size 16",),
        "SGLang 0.5.23 on CPUs; SGLang 0.5.17 on an H100",
        ("page_size",),
        lambda arguments: arguments.page_size == 16,
        family="dense_gqa",
    ),
)

_ROLE = "indexcache"  # attribute of a RadixAttention that holds its `LayerRole`
CAPTURED = "indexcache_captured"
"""On a backend, by batch size and layer: the letters that ran while CUDA graphs were captured."""


def _keeps(pattern: Pattern) -> bool:
    """Return whether selecting layers keep something of requests from pass to pass."""
    chosen = selection_in(pattern)
    return chosen is not None and (chosen.score in OWN_SCORES or chosen.steps != NO_MEMORY)


@dataclass
class LayerRole:
    """The role of one layer while it decodes.

    Attributes:
        role: its letter.
        chooses: whether it selects pages, for itself (F) or for the layers above.
        selection: how it selects them.
    """

    role: str
    chooses: bool
    selection: Selection

    @classmethod
    def of(cls, module: Any) -> LayerRole | None:
        """Read the role of a `RadixAttention`; `None` before one was written."""
        found = module.__dict__.get(_ROLE)
        return found if isinstance(found, cls) else None


class DenseGqaSglang(SglangAdapter):
    """An adapter that writes the roles once SGLang has built its attention backend."""

    serving = Feature(
        "dense_gqa", "patterns of D, F and S on Llama, Qwen2, Qwen3 and Mistral", _NEEDS, "no server for these"
    )
    variants: ClassVar[tuple[Feature, ...]] = (KEEPING, *(item.feature for item in BACKENDS))
    proven_after: ClassVar[Need] = LOAD_BACKENDS
    calibrated = False
    prompt_graphs_since = (0, 5, 14)
    fp8_on_blackwell = False
    refused_flags: ClassVar[Mapping[str, str]] = {
        "speculative_algorithm": f"{_CHOSEN_IN_DECODING}, and drafts are verified as prompts are read",
        "enable_mixed_chunk": f"{_CHOSEN_IN_DECODING}, and mixed chunks decode as prompts are read",
        "enable_pdmux": "it has an attention backend of its own for every stream",
        "enable_hisparse": "it swaps pages by a choice of its own",
        "enable_unified_memory": "its slots are not those of the page table",
        "dcp_size": "a rank would choose among its own part of the tokens",
        "attn_cp_size": "a rank would choose among its own part of the tokens",
        "enable_prefill_cp": "a rank would choose among its own part of the tokens",
        "enable_torch_compile": _UNTRIED,
        "enable_dp_attention": _UNTRIED,
        "dllm_algorithm": f"{_CHOSEN_IN_DECODING}, and diffusion models decode blocks",
    }

    def needed(self, pattern: Pattern) -> tuple[Feature, ...]:
        """See `SglangAdapter.needed`; what selects by each step's own attention needs no more than `serving`."""
        return (*super().needed(pattern), *([KEEPING] if _keeps(pattern) else []))

    def in_backends(self, arguments: Any) -> tuple[Feature, ...]:
        """See `SglangAdapter.in_backends`; SGLang takes any of them where none is named."""
        named = {arguments.attention_backend, arguments.decode_attention_backend} - {None}
        return tuple(item.feature for item in BACKENDS if not named or item.name in named)

    def combinations(self) -> tuple[Combination, ...]:
        """See `SglangAdapter.combinations`."""
        return _COMBINATIONS

    def refused_with(self, pattern: Pattern, arguments: Any) -> Iterator[tuple[str, str]]:
        """See `SglangAdapter.refused_with`: who keeps something of requests must see their prompts."""
        chosen = selection_in(pattern)
        if chosen is None or not _keeps(pattern):
            return
        what = f"score {chosen.score}" if chosen.score in OWN_SCORES else f"steps {chosen.steps}"
        if getattr(arguments, "disaggregation_mode", None) == "decode":
            given = "--disaggregation-mode"
            yield given, f"{given} decode can't be combined with {what}: {_KEPT_IN_READING}, which is done elsewhere"
        if getattr(arguments, "enable_pd_role_switch", None):
            given = "--enable-pd-role-switch"
            yield given, f"{given} can't be combined with {what}: {_KEPT_IN_READING}, and others may read it"
        if getattr(arguments, "cuda_graph_backend_prefill", None) == "tc_piecewise":
            given = "--cuda-graph-backend-prefill"
            yield given, f"{given} tc_piecewise can't be combined with {what}: {_UNTRIED}"
        if getattr(arguments, "enable_piecewise_cuda_graph", None):
            given = "--enable-piecewise-cuda-graph"
            yield given, f"{given} can't be combined with {what}: {_UNTRIED}"

    def to_overrides(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        """See `SglangAdapter.to_overrides`."""
        self.checkpoint.check_overrides(overrides)
        for key in ("num_hidden_layers", *WINDOW_KEYS):
            if key in overrides:
                raise SpellingError(
                    f"{FLAG}: {key} changes which layers there are; expected a file made for that model"
                )
        chosen = selection_in(pattern)
        if chosen is None:
            return dict(overrides)
        if chosen.heads != JOINT:
            raise SpellingError(
                f"selection {chosen} is not served yet: heads is {chosen.heads}, expected {JOINT}; SGLang has one page"
                " table for all heads"
            )
        if FULL in pattern.roles and chosen.score not in OWN_SCORES:
            raise SpellingError(
                f"layer {pattern.roles.index(FULL)} is F, which is not served with score {chosen.score};"
                f" expected {' or '.join(OWN_SCORES)}"
            )
        if chosen.steps.policy not in SERVED_POLICIES:
            raise SpellingError(f"steps {chosen.steps} are not served; expected {', '.join(SERVED_POLICIES)}")
        if chosen.buffer_pages is not None:
            raise SpellingError(f"buffer_pages is {chosen.buffer_pages}, which is not served; expected none")
        return dict(overrides)

    def loaded(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.loaded`."""
        chosen = selection_in(pattern)
        assert chosen is not None
        self._check_layers(runner.model)
        if runner.model_config.context_len <= chosen.tokens:
            raise ProofError(
                f"a context of {runner.model_config.context_len} tokens fits into the {chosen.tokens} of the selection,"
                " so nothing would be shared; expected fewer pages"
            )
        if chosen.page_tokens % runner.page_size:
            raise ProofError(
                f"--page-size is {runner.page_size}, expected a divisor of the selection's page_tokens,"
                f" {chosen.page_tokens}"
            )
        if chosen.score == COMPRESSED_KEYS and runner.page_size % STRIDE:
            raise ProofError(
                f"--page-size is {runner.page_size}, expected a multiple of {STRIDE} for score {COMPRESSED_KEYS}"
            )
        if chosen.steps != NO_MEMORY and runner.page_size == 1:
            raise ProofError(
                f"--page-size is 1, expected more for steps {chosen.steps}: with 1 SGLang's beam search lets requests"
                " trade places, and their memory would stay"
            )
        if runner.kv_cache_dtype != runner.dtype:
            raise ProofError(f"the KV cache is of {runner.kv_cache_dtype}, expected the model's own {runner.dtype}")
        for name in BACKEND_ATTRIBUTES:
            backend = getattr(runner, name, None)
            if backend is not None:
                backend.__class__ = make_backend_class(type(backend), _allows_unread(runner.server_args))
                backend.indexcache_selection = chosen
        self.switch(runner, pattern)
        self.keep_pages(runner, pattern)

    def keep_pages(self, runner: Any, pattern: Pattern) -> None:
        """Allocate what selecting layers keep of cached pages, and hand it to the attention backends.

        Raises:
            ProofError: if the device has no room for it.
        """
        import torch

        from indexcache_dense.family.layer_pages import LayerPages

        assert pattern.selection is not None
        table = runner.req_to_token_pool.req_to_token
        kept = {}
        for layer, module in self.modules(runner.model):
            role = LayerRole.of(module)
            if role is not None and role.chooses:
                keys = runner.token_to_kv_pool.get_key_buffer(layer)
                try:
                    kept[layer] = LayerPages.allocate(role.selection, keys, *table.shape)
                except torch.OutOfMemoryError as error:
                    raise ProofError(
                        f"the device has no room for what layer {layer} keeps of pages; expected a smaller"
                        " --mem-fraction-static"
                    ) from error
        for name in BACKEND_ATTRIBUTES:
            backend = getattr(runner, name, None)
            if backend is not None:
                backend.indexcache_pages, backend.indexcache_requests = kept, table

    def _check_layers(self, model: Any) -> None:
        """Check that all layers attend to everything before them, with heads of one shape."""
        shapes = set()
        for layer, module in self.modules(model):
            shapes.add((module.tp_q_head_num, module.tp_k_head_num, module.qk_head_dim, module.v_head_dim))
            for what, has_it in (
                ("a sliding window", module.sliding_window_size not in (None, -1)),
                ("cross attention", module.is_cross_attention),
                ("a soft cap", bool(module.logit_cap)),
                ("an encoder's attention", getattr(module.attn_type, "value", module.attn_type) != "decoder"),
            ):
                if has_it:
                    raise ProofError(f"layer {layer} has {what}, expected layers that attend to everything before them")
        if len(shapes) > 1:
            raise ProofError(f"layers differ in their heads ({sorted(shapes)}), expected one shape")

    def captured(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.captured`; for each batch size, every layer must have decoded by its letter."""
        noted = vars(runner.attn_backend).get(CAPTURED, {})
        layers = [layer for layer, _ in self.modules(runner.model)]
        expected = "".join(pattern[layer] for layer in layers)
        for size in getattr(runner.decode_cuda_graph_runner, "capture_bs", ()):
            letters = "".join(noted.get(size, {}).get(layer, "-") for layer in layers)
            if letters != expected:
                raise ProofError(
                    f"the CUDA graph of {size} requests was captured with {letters}, the pattern says {expected}"
                )

    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        """See `SglangAdapter.modules`."""
        attentions = [module for module in model.modules() if type(module).__name__ == "RadixAttention"]
        yield from sorted(((module.layer_id, module) for module in attentions), key=lambda item: item[0])

    def role(self, site: int, module: Any) -> str:
        """See `SglangAdapter.role`; `D` where none was written."""
        found = LayerRole.of(module)
        return DENSE if found is None else found.role

    def selection(self, model: Any) -> Selection | None:
        """See `SglangAdapter.selection`.

        Raises:
            ProofError: if the layers of this rank differ.
        """
        roles = (LayerRole.of(module) for _, module in self.modules(model))
        found = {None if role is None else role.selection for role in roles}
        if len(found) > 1:
            raise ProofError("the layers of this rank were told different selections")
        return found.pop() if found else None

    def indexer(self, module: Any) -> None:
        """See `SglangAdapter.indexer`."""
        return None

    def saved(self, runner: Any) -> Mapping[str, int]:
        """See `SglangAdapter.saved`: what selecting layers keep beside the cache."""
        kept = vars(runner.attn_backend).get("indexcache_pages", {})
        total = sum(pages.nbytes for pages in kept.values())
        return {"kept_page_bytes": total} if total else {}

    def switch(self, runner: Any, pattern: Pattern) -> None:
        """See `SglangAdapter.switch`."""
        chosen = selection_in(pattern)
        assert chosen is not None
        for layer, module in self.modules(runner.model):
            above = pattern.roles[layer + 1 : layer + 2]
            letter = pattern.roles[layer : layer + 1]
            chooses = letter == FULL or (letter != SHARED and above == SHARED)
            setattr(module, _ROLE, LayerRole(letter, chooses, chosen))

    def configured(self, runner: Any) -> str:
        """See `SglangAdapter.configured`."""
        return "".join(self.role(layer, module) for layer, module in self.modules(runner.model))


def _allows_unread(server_args: Any) -> bool:
    """Return whether the engine with these server arguments may replace methods whose source nobody has read."""
    request: Request | None = getattr(server_args, ATTRIBUTE, None)
    return request is not None and request.asked.allow_unread
