"""Hooks on SGLang: all of them are applied, or the process ends."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from pkgutil import resolve_name
from typing import Any

from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.refusal import refuse, refuse_unforeseen
from sglang_indexcache.sglang.probes import Feature, Need, SglangError, SglangSource


def refusing(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `hook` so that any error ends the process: SGLang would log some of them and serve on."""

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
    """Wrap a hook that calls its target, like `refusing`; an error of the target is SGLang's, and passes."""

    @functools.wraps(hook)
    def guarded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        theirs: list[Exception] = []

        @functools.wraps(original)
        def observed(*inner: Any, **named: Any) -> Any:
            try:
                return original(*inner, **named)
            except Exception as error:
                theirs.append(error)
                raise

        try:
            return hook(observed, *args, **kwargs)
        except Exception as error:
            if any(error is other for other in theirs):
                raise
            if isinstance(error, IndexCacheError):
                refuse(str(error))
            refuse_unforeseen(f"hook {hook.__module__}.{hook.__qualname__}", error)

    return guarded


def bound_arguments(need: Need, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of a hooked call by name; a hook's wrapper has its target's signature."""
    target = resolve_name(f"sglang.{need.module}:{need.name}")
    return bound_to(getattr(target, "__func__", target), args, kwargs)  # with a classmethod's class


def bound_to(original: Callable[..., Any], args: Any, kwargs: Any) -> inspect.BoundArguments:
    """Return the arguments of a call of `original` by name."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound


def installed_source(features: Iterable[Feature]) -> SglangSource:
    """Return the installed SGLang, which has all that `features` need.

    Raises:
        SglangError: if it is not there, or lacks something.
    """
    source = SglangSource.installed()
    if source is None:
        raise SglangError("SGLang is not installed")
    source.require(*features)
    return source


class Hooks:
    """The hooks of this plugin, which SGLang's registry applies all at once.

    The registry applies the hooks of a function once in a process, which may be long ago, and only logs those that it
    could not apply. So `apply` hands it each function again, whatever other plugins did there.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, list[tuple[str, Callable[..., Any]]]] = {}

    def add(self, kind: str, need: Need, function: Callable[..., Any]) -> None:
        """Run `function` with `need`.

        Args:
            kind: `BEFORE` (it may return other arguments), `AFTER` (with the result first), or `AROUND` (with `need`
                itself first).
            need: function of SGLang.
            function: the hook.
        """
        guard = refusing_around if kind == "AROUND" else refusing
        self._wanted.setdefault(need.target, []).append((kind, guard(function)))

    def apply(self, *registered: Need) -> None:
        """Apply all hooks.

        Args:
            registered: functions whose hooks SGLang's registry should have applied before.

        Raises:
            SglangError: naming the function whose hook could not be applied.
        """
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        missing = {need.target for need in registered} - HookRegistry._patched
        if missing:
            raise _not_applied(min(missing))
        registry = logging.getLogger(HookRegistry.__module__)
        level = registry.level
        registry.setLevel(max(logging.WARNING, registry.getEffectiveLevel()))  # a line each, in every process
        try:
            for target, hooks in sorted(self._wanted.items()):
                try:
                    HookRegistry._apply_target(target, [(HookType[kind], hook, None) for kind, hook in hooks])
                except (ImportError, AttributeError):
                    raise _not_applied(target) from None
        finally:
            registry.setLevel(level)


def _not_applied(target: str) -> SglangError:
    return SglangError(f"SGLang did not apply the hook on {target}, so the pattern would not be proven")
