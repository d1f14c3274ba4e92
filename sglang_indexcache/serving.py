"""Serving a pattern in SGLang: handed over through SGLang's own configuration, proven on the loaded model.

Two hooks, neither in the forward pass: before every `ModelConfig` is built the pattern is merged into its overrides,
and after `ModelRunner.load_model` each attention module of this rank is compared with what was asked for.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.overrides import merge_overrides, parse_overrides
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file import PatternFile
from sglang_indexcache.plugin import refuse

logger = logging.getLogger(__name__)

MODEL_CONFIG = "sglang.srt.configs.model_config.ModelConfig.__init__"
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
_PARAMETERS = {
    MODEL_CONFIG: {"model_path", "model_override_args", "is_draft_model"},
    LOAD_MODEL: set(),
    SCHEDULER: set(),
}


class HookError(IndexCacheError):
    """An SGLang that lacks a place this plugin hooks."""


@dataclass(frozen=True)
class Serving:
    """The pattern to serve and how strictly its file must match the model."""

    file: PatternFile
    allow_config_mismatch: bool

    @property
    def pattern(self) -> Pattern:
        return self.file.as_pattern()

    def check_model(self, model_path: str) -> None:
        """Pre-flight: length, locked layers, indexer weights, config digest.

        Raises:
            IndexCacheError: one line.
        """
        for error in Checkpoint.read(model_path).misfits(self.file, self.allow_config_mismatch):
            raise error

    def merged(self, overrides: str) -> str:
        """`--json-model-override-args` with the pattern in it."""
        return json.dumps(merge_overrides(parse_overrides(overrides), self.pattern))


def install(spec: str, allow_config_mismatch: bool = False) -> None:
    """Register the hooks that serve the pattern file `spec`.

    Raises:
        IndexCacheError: if the file can't be used, or this SGLang lacks a hook target.
    """
    serving = Serving(PatternFile.load(spec), allow_config_mismatch)
    signatures = {target: _probe(target, needed) for target, needed in _PARAMETERS.items()}
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(MODEL_CONFIG, _merge_pattern(serving, signatures[MODEL_CONFIG]), HookType.BEFORE)
    HookRegistry.register(LOAD_MODEL, _prove(serving), HookType.AFTER)

    def hooks_are_in(*args: Any, **kwargs: Any) -> None:
        missing = {MODEL_CONFIG, LOAD_MODEL} - HookRegistry._patched
        if missing:
            refuse(f"SGLang did not apply the hook on {min(missing)}, so the pattern would not be proven")

    HookRegistry.register(SCHEDULER, hooks_are_in, HookType.BEFORE)


def _probe(target: str, needed: set[str]) -> inspect.Signature:
    """The signature of a hook target, checked for the parameters we use."""
    module_name, class_name, method = target.rsplit(".", 2)
    try:
        function = getattr(getattr(import_module(module_name), class_name), method)
    except (ImportError, AttributeError) as error:
        raise HookError(f"this SGLang has no {target}: {error}") from None
    signature = inspect.signature(function)
    missing = needed - set(signature.parameters)
    if missing:
        raise HookError(f"{target} of this SGLang has no parameter {min(missing)}")
    return signature


def _merge_pattern(serving: Serving, signature: inspect.Signature) -> Callable[..., Any]:
    check_model = cache(serving.check_model)  # SGLang builds several configurations of one model

    def before(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if not bound.arguments["is_draft_model"]:  # a NextN layer always runs its own indexer
            try:
                check_model(bound.arguments["model_path"])
                merged = serving.merged(bound.arguments["model_override_args"])
            except IndexCacheError as error:
                refuse(str(error))
            bound.arguments["model_override_args"] = merged
        return bound.args, bound.kwargs

    return before


def _prove(serving: Serving) -> Callable[..., None]:
    def after(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(runner, "is_draft_worker", False):
            return
        effective = effective_roles(runner.model)
        problem = mismatch(serving.pattern, effective)
        if problem is not None:
            refuse(problem)
        logger.info(
            "indexcache: serving %s, fingerprint %s, %d attention modules checked",
            serving.pattern,
            serving.pattern.fingerprint,
            len(effective),
        )

    return after


@dataclass(frozen=True)
class Effective:
    """What an attention module will do: its role, and whether it has an indexer to run."""

    role: str
    has_indexer: bool


def effective_roles(model: Any) -> dict[int, Effective]:
    """The DSA attention modules of a loaded model by layer, NextN modules left out."""
    found = {}
    for module in model.modules():
        skips = getattr(module, "skip_topk", None)
        if skips is None or not hasattr(module, "next_skip_topk") or getattr(module, "is_nextn", False):
            continue
        found[module.layer_id] = Effective("S" if skips else "F", getattr(module, "indexer", None) is not None)
    return found


def mismatch(pattern: Pattern, effective: dict[int, Effective]) -> str | None:
    """One line if the loaded layers differ from `pattern`; pipeline stages hold some of the layers only."""
    if not effective:
        return "the loaded model has no DSA attention module, so the pattern can't take effect"
    for layer, found in sorted(effective.items()):
        if layer >= len(pattern):
            return f"the loaded model has a DSA layer {layer}, the pattern has {len(pattern)} letters"
        if found.role != pattern[layer]:
            return f"layer {layer} would run as {found.role}, the pattern says {pattern[layer]}"
        if found.role == "F" and not found.has_indexer:
            return f"layer {layer} is F, but the loaded model has no indexer there"
    return None
