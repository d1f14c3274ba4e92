"""Breaks SGLang on purpose, as asked by the environment, so that tests see whether a server still comes up.

`DSA_CPU_REMOVE=dotted.path` deletes that function or class before hooks are applied, as a newer SGLang might have.
`DSA_CPU_BREAK=roles` makes every layer F whatever the configuration says; `weights` keeps the loader from loading one
indexer tensor of layer 3 (`index-weights` and `index-bias` do of DeepSeek-V4); `forward` wraps one of its indexers;
`verify` lets layer 3 reuse a selection and `verify-shared` layer 4 make one where draft tokens are verified, `context`
lets layer 3 reuse one where ranks share out a context, `updated` once weights were updated; `loader` moves the work of
`ModelRunner.load_model` into another method; `prefixes` lets calibration run with the prefix cache on, `radix` also
never flushes it. Of dense models, `dense-backend` puts another class in the place of the attention backend,
`dense-page-size` and `dense-window` change what the model runner and layer 2 say, `dense-role` and `dense-selection`
what layer 3 is told.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pkgutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

LOST = {
    "weights": ".layers.3.self_attn.indexer.wq_b.",
    "index-weights": "layers.3.attn.indexer.wq_b.",
    "index-bias": "layers.3.attn.indexer.compressor.ape",
}
TURNED = {"verify": 3, "verify-shared": 4, "context": 3, "updated": 3}  # layer
_SEEN: dict[str, Any] = {"loads": 0}


def apply() -> None:
    """Do what the environment asks for; nothing without it."""
    target = os.environ.get("DSA_CPU_REMOVE")
    if target:
        owner, _, name = target.rpartition(".")
        delattr(pkgutil.resolve_name(owner), name)
    broken = os.environ.get("DSA_CPU_BREAK")
    if broken == "roles":
        rule = "sglang.srt.configs.model_config.dsa_layer_skips_topk"
        HookRegistry.register(rule, lambda config, layer_id: False, HookType.REPLACE)
    elif broken in LOST:
        kind = "deepseek_v2.DeepseekV2" if broken == "weights" else "deepseek_v4.DeepseekV4"
        loader = f"sglang.srt.models.{kind}ForCausalLM.load_weights"
        HookRegistry.register(loader, functools.partial(_lose_weights, LOST[broken]), HookType.AROUND)
    elif broken == "forward":
        loader = "sglang.srt.models.deepseek_v4.DeepseekV4ForCausalLM.post_load_weights"
        HookRegistry.register(loader, _wrap_an_indexer, HookType.AFTER)
    elif broken in TURNED:
        models = "sglang.srt.models.deepseek_v2.DeepseekV2"
        turn = functools.partial(_turn_a_layer, broken)
        HookRegistry.register(models + "AttentionMLA.forward", turn, HookType.AROUND)
        HookRegistry.register(models + "ForCausalLM.load_weights", _count_a_load, HookType.AFTER)
    elif broken is not None and broken.startswith("dense-"):
        backends = "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends"
        HookRegistry.register(backends, functools.partial(_break_dense, broken), HookType.BEFORE)
    elif broken == "loader":
        from sglang.srt.model_executor.model_runner import ModelRunner

        ModelRunner.load_model_elsewhere = ModelRunner.load_model
        source = inspect.getsource(ModelRunner.initialize).replace("self.load_model()", "self.load_model_elsewhere()")
        assert "load_model_elsewhere" in source
        module = inspect.getmodule(ModelRunner)
        exec(textwrap.dedent(source), module.__dict__)
        ModelRunner.initialize = module.__dict__.pop("initialize")
    elif broken in ("radix", "prefixes"):
        from sglang_indexcache.calibration import preflight

        preflight._WANTED.pop("disable_radix_cache")
        if broken == "radix":
            HookRegistry.register(
                "sglang.srt.managers.scheduler.Scheduler.flush_cache", lambda *_, **__: True, HookType.REPLACE
            )


def _break_dense(broken: str, runner: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.layers.attention import attention_registry, torch_native_backend

    from indexcache_dense.family import DENSE_GQA
    from indexcache_dense.family.sglang import DenseGqaSglang

    switch = DenseGqaSglang.switch

    def switched(adapter: Any, runner: Any, pattern: Any) -> None:
        switch(adapter, runner, pattern)
        role = layers[3].indexcache
        changes: dict[str, Any] = {"role": "D"}
        if broken == "dense-selection":
            changes = {"selection": dataclasses.replace(role.selection, pages=9)}
        layers[3].indexcache = dataclasses.replace(role, **changes)

    layers = dict(DENSE_GQA.sglang.modules(runner.model))
    if broken == "dense-backend":
        other = type("OtherBackend", (torch_native_backend.TorchNativeAttnBackend,), {})
        attention_registry.ATTENTION_BACKENDS["torch_native"] = other
    elif broken == "dense-page-size":
        runner.page_size = 8
    elif broken == "dense-window":
        layers[2].sliding_window_size = 64
    else:
        DenseGqaSglang.switch = switched


def _wrap_an_indexer(result: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    found = [module for module in model.modules() if type(module).__name__ == "C4Indexer"]
    forward = found[3].forward
    found[3].forward = lambda *inner, **named: forward(*inner, **named)


def _turn_a_layer(broken: str, original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Turn a layer's role round for the length of a call of its attention; an S layer takes the first indexer."""
    if module.is_nextn:
        return original(module, *args, **kwargs)
    indexer = getattr(module, "indexer", None)
    if module.layer_id == 0:
        _SEEN["indexer"] = indexer
    batch = kwargs["forward_batch"]
    wanted = {
        "updated": _SEEN["loads"] > 1,
        "context": getattr(batch, "attn_cp_metadata", None) is not None,
    }.get(broken, batch.forward_mode.is_target_verify())
    if module.layer_id not in (TURNED[broken] - 1, TURNED[broken]) or not wanted:
        return original(module, *args, **kwargs)
    changes = {"skip_topk": not module.skip_topk, "indexer": indexer or _SEEN["indexer"]}
    if module.layer_id != TURNED[broken]:
        changes = {"next_skip_topk": True}  # hands its selection on
    before = {name: getattr(module, name, None) for name in changes}
    vars(module).update(changes)
    try:
        return original(module, *args, **kwargs)
    finally:
        vars(module).update(before)


def _count_a_load(*_: Any, **__: Any) -> None:
    _SEEN["loads"] += 1


def _lose_weights(
    lost: str, original: Any, model: Any, weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any
) -> Any:
    def kept() -> Iterator[tuple[str, Any]]:
        return (item for item in weights if lost not in item[0])

    return original(model, kept(), *args, **kwargs)
