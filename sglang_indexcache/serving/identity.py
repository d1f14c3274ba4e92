"""Cached and transferred KV is only good for the pattern that wrote it: an S layer leaves no index keys behind.

In dense models it leaves its keys, whose values depend on the pattern where they were decoded; prefill servers know no
pattern there. SGLang restores such holes silently, so the fingerprint goes where SGLang itself compares: into the keys
of HiCache storage, and into the data type that prefill and decode servers compare when they meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_indexcache.serving.request import Request


def tag(request: Request) -> str:
    """Short form of the fingerprint for names; all-F has one too, since a served all-F is not an unknown pattern."""
    return f"indexcache-{request.pattern.fingerprint[:16]}"


def cache_keys(request: Request) -> Callable[..., None]:
    """Hook after `HiCacheController._generate_storage_config`: the model name in storage keys carries the pattern."""

    def after(config: Any, *args: Any, **kwargs: Any) -> None:
        config.model_name = f"{config.model_name or ''}-{tag(request)}"

    return after


def handshake(request: Request) -> Callable[..., None]:
    """Hook before `CommonKVManager.__init__`: peers compare `kv_cache_dtype_str` and refuse each other if it differs.

    A decode server then says: KV cache dtype mismatch: prefill server has kv_cache_dtype=bfloat16+indexcache-...
    """

    def before(manager: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        if request.pattern.selection is not None:
            return  # all layers of a dense model write their keys, whoever prefills
        if not args.kv_cache_dtype_str.endswith(tag(request)):
            args.kv_cache_dtype_str = f"{args.kv_cache_dtype_str}+{tag(request)}"

    return before
