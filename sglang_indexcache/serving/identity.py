"""Cached and transferred KV is only good for the pattern that wrote it: an S layer leaves no index keys behind.

In dense models it leaves its keys, whose values depend on the pattern while decoding; prefill servers know no pattern
there. SGLang restores such holes silently, so the fingerprint goes where SGLang itself compares: into the keys of
HiCache storage, and into the data type that prefill and decode servers compare when they meet.
"""

from __future__ import annotations

import re
from typing import Any

from sglang_indexcache.pattern import Pattern

_REFUSAL = re.compile(r"prefill server has kv_cache_dtype=([^\s,]+),")


def tag(pattern: Pattern) -> str:
    """Return a short form of the fingerprint for names; all-F has one too, since it is not an unknown pattern."""
    return f"indexcache-{pattern.fingerprint[:16]}"


def mark_cache_keys(pattern: Pattern, config: Any) -> None:
    """Add the pattern to the model name in storage keys (after `HiCacheController._generate_storage_config`)."""
    config.model_name = f"{config.model_name or ''}-{tag(pattern)}"


def mark_handshake(pattern: Pattern, args: Any) -> bool:
    """Add the pattern to `kv_cache_dtype_str`, which peers compare (before `CommonKVManager.__init__`).

    Peers refuse each other if it differs. A decode server then says: KV cache dtype mismatch: prefill server has
    kv_cache_dtype=bfloat16+indexcache-...

    Returns:
        Whether it is marked; all layers of a dense model write their keys, whoever prefills.
    """
    if pattern.dense:
        return False
    if not args.kv_cache_dtype_str.endswith(tag(pattern)):
        args.kv_cache_dtype_str = f"{args.kv_cache_dtype_str}+{tag(pattern)}"
    return True


def of_another(pattern: Pattern, error: str) -> str | None:
    """Return what a prefill server's KV is of, if SGLang refuses it for its pattern, or `None` for another reason."""
    found = _REFUSAL.search(error)
    if found is None or pattern.dense or found[1].endswith(tag(pattern)):
        return None
    theirs = found[1].partition("+")[2]
    return theirs or "none of ours"
