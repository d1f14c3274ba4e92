"""Hooks on SGLang that are all in, or end the process."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import Any

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.families.base import Family
from sglang_indexcache.model_name import at_revision
from sglang_indexcache.overrides import parse_overrides
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.probes import MODEL_CONFIG, Feature, Need, SglangError, SglangSource
from sglang_indexcache.refusal import refuse, refuse_unforeseen


def refusing(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, ending the process on any error: SGLang would log some of them and serve on."""

    @functools.wraps(hook)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except IndexCacheError as error:
            refuse(str(error))
        except Exception as error:
            refuse_unforeseen(f"hook {hook.__module__}.{hook.__qualname__}", error)

    return guarded


def refusing_around(hook: Callable[..., Any]) -> Callable[..., Any]:
    """As `refusing`, for a hook that calls what it is around; what fails in there is SGLang's, and passes."""

    @functools.wraps(hook)
    def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        theirs: list[Exception] = []

        @functools.wraps(original)
        def watched(*inner: Any, **named: Any) -> Any:
            try:
                return original(*inner, **named)
            except Exception as error:
                theirs.append(error)
                raise

        try:
            return hook(watched, *args, **kwargs)
        except Exception as error:
            if any(error is other for other in theirs):
                raise
            if isinstance(error, IndexCacheError):
                refuse(str(error))
            refuse_unforeseen(f"hook {hook.__module__}.{hook.__qualname__}", error)

    return guarded


def bound_arguments(need: Need, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """The arguments of a hooked call by name; a hook's wrapper has its target's signature."""
    target = resolve_name(f"sglang.{need.module}:{need.name}")
    bound = inspect.signature(getattr(target, "__func__", target)).bind(*args, **kwargs)  # with a classmethod's class
    bound.apply_defaults()
    return bound


def give_pattern(args: Any, kwargs: Any, plan_for: Callable[[str], tuple[Family, Pattern]]) -> tuple[Any, Any] | None:
    """Arguments of `ModelConfig.__init__` with a pattern in their overrides; `None` for a draft model's.

    A NextN layer always runs its own indexer.

    Args:
        args: positional arguments of the hooked call.
        kwargs: its keyword arguments.
        plan_for: gives the family and the pattern of the model at a path.

    Raises:
        IndexCacheError: if `plan_for` refuses, or the overrides say something else.
    """
    bound = bound_arguments(MODEL_CONFIG, args, kwargs)
    if bound.arguments["is_draft_model"]:
        return None
    family, pattern = plan_for(at_revision(bound.arguments["model_path"], bound.arguments.get("revision")))
    merged = family.handed_over(parse_overrides(bound.arguments["model_override_args"]), pattern)
    bound.arguments["model_override_args"] = json.dumps(merged)
    return bound.args, bound.kwargs


def installed_source(features: Iterable[Feature]) -> SglangSource:
    """The installed SGLang, with all that `features` need.

    Raises:
        SglangError: if it is not there, or lacks something.
    """
    source = SglangSource.installed()
    if source is None:
        raise SglangError("SGLang is not installed")
    source.require(*features)
    return source


class Hooks:
    """Registers hooks with SGLang, whose registry applies them later, and only logs what it could not apply."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()

    def before(self, need: Need, function: Callable[..., Any]) -> None:
        self._register(need, function, "BEFORE")

    def after(self, need: Need, function: Callable[..., Any]) -> None:
        self._register(need, function, "AFTER")

    def around(self, need: Need, function: Callable[..., Any]) -> None:
        self._register(need, function, "AROUND")

    def guard(self, *needs: Need) -> None:
        """Before each of `needs`, check that all hooks were applied, also those registered later."""
        for need in needs:
            self.before(need, self._all_are_in)

    def _register(self, need: Need, function: Callable[..., Any], kind: str) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        self._wanted.add(need.target)
        guard = refusing_around if kind == "AROUND" else refusing
        HookRegistry.register(need.target, guard(function), HookType[kind])

    def _all_are_in(self, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        missing = self._wanted - HookRegistry._patched
        if missing:
            raise SglangError(f"SGLang did not apply the hook on {min(missing)}, so the pattern would not be proven")
