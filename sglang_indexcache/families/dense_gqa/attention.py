"""SGLang's attention of dense models: S layers run stock decode attention over another page table.

SGLang builds one attention backend a rank; each `RadixAttention` calls it with itself. Once it is built, its class
becomes a subclass that decodes S layers over the pages that were chosen. Prefill is SGLang's own. Read:
sglang/srt/layers/radix_attention.py, layers/attention/torch_native_backend.py and
ModelRunner.init_attention_backends of 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dense_gqa.backends import choosing
from sglang_indexcache.pattern import DENSE, SHARED, Pattern
from sglang_indexcache.probes import LOAD_BACKENDS, LOAD_GRAPHS, Need
from sglang_indexcache.selection import Selection

LAYER = Need("srt.layers.radix_attention", "RadixAttention.__init__", ("layer_id", "sliding_window_size"))
NEEDS = (LOAD_BACKENDS, LOAD_GRAPHS, LAYER)

_PLACE = "indexcache"  # of a `Place`, on a RadixAttention
CAPTURED = "indexcache_captured"
"""On a backend, by batch size and layer: the letters that ran while CUDA graphs were captured."""


@dataclass
class Place:
    """What one layer does while it decodes.

    Attributes:
        role: its letter.
        chooses: whether it also chooses pages for the layers above.
        selection: how.
    """

    role: str
    chooses: bool
    selection: Selection


def modules(model: Any) -> Iterator[tuple[int, Any]]:
    """The attention modules of this rank by layer."""
    attentions = [module for module in model.modules() if type(module).__name__ == "RadixAttention"]
    yield from sorted(((module.layer_id, module) for module in attentions), key=lambda item: item[0])


def place(module: Any) -> Place | None:
    """What a `RadixAttention` was told; `None` before `install`."""
    told = module.__dict__.get(_PLACE)
    return told if isinstance(told, Place) else None


def role(site: int, module: Any) -> str:
    """The letter that the module runs: `D` where it was told nothing."""
    told = place(module)
    return DENSE if told is None else told.role


def selection(model: Any) -> Selection | None:
    """The selection that all modules of this rank were told.

    Raises:
        ProofError: if they differ.
    """
    told = {None if item is None else item.selection for item in (place(module) for _, module in modules(model))}
    if len(told) > 1:
        raise ProofError("the layers of this rank were told different selections")
    return told.pop() if told else None


def install(runner: Any, pattern: Pattern) -> None:
    """Make the attention backend of a `ModelRunner` run `pattern`.

    Raises:
        ProofError: if its layers or its backend are none that can.
    """
    chosen = pattern.selection
    assert chosen is not None
    _check_layers(runner.model)
    if runner.model_config.context_len <= chosen.tokens:
        raise ProofError(
            f"a context of {runner.model_config.context_len} tokens fits into the {chosen.tokens} of the selection, so"
            " nothing would be shared; expected fewer pages"
        )
    if chosen.page_tokens % runner.page_size:
        raise ProofError(
            f"--page-size is {runner.page_size}, expected a divisor of the selection's page_tokens,"
            f" {chosen.page_tokens}"
        )
    if runner.kv_cache_dtype != runner.dtype:
        raise ProofError(f"the KV cache is of {runner.kv_cache_dtype}, expected the model's own {runner.dtype}")
    for name in ("attn_backend", "decode_attn_backend"):
        backend = getattr(runner, name, None)
        if backend is not None:
            backend.__class__ = choosing(type(backend))
            backend.indexcache_selection = chosen
    switch(runner, pattern)


def _check_layers(model: Any) -> None:
    """All layers attend to everything before them, with heads of one shape.

    Raises:
        ProofError: naming the first that does not.
    """
    shapes = set()
    for layer, module in modules(model):
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


def switch(runner: Any, pattern: Pattern) -> None:
    """Write the roles of this rank's layers."""
    assert pattern.selection is not None
    for layer, module in modules(runner.model):
        above = pattern.roles[layer + 1 : layer + 2]
        letter = pattern.roles[layer : layer + 1]
        setattr(module, _PLACE, Place(letter, letter != SHARED and above == SHARED, pattern.selection))


def check_captured(runner: Any, pattern: Pattern) -> None:
    """Check that each layer decoded by its letter while each CUDA graph was captured, of every batch size.

    Raises:
        ProofError: naming a batch size where that is not so.
    """
    noted = vars(runner.attn_backend).get(CAPTURED, {})
    layers = [layer for layer, _ in modules(runner.model)]
    expected = "".join(pattern[layer] for layer in layers)
    for size in getattr(runner.decode_cuda_graph_runner, "capture_bs", ()):
        letters = "".join(noted.get(size, {}).get(layer, "-") for layer in layers)
        if letters != expected:
            raise ProofError(
                f"the CUDA graph of {size} requests was captured with {letters}, the pattern says {expected}"
            )


def configured(runner: Any) -> str:
    """The letters that were written last, of this rank's layers."""
    return "".join(role(layer, module) for layer, module in modules(runner.model))
