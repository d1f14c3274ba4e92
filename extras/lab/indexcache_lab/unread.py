"""Say which source of SGLang that a room of the lab relies on nobody has read."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_indexcache.io.refusal import UNREAD_FLAG
from sglang_indexcache.sglang.probes import Feature, SglangSource
from sglang_indexcache.sglang.read_sources import digest


def first_unread(source: SglangSource, feature: Feature, read: Mapping[str, Mapping[str, str]]) -> str | None:
    """Return one line if a function or class that `feature` relies on is not as it was read, or `None`.

    Args:
        source: the SGLang that is installed.
        feature: what relies on them.
        read: by dotted path below `sglang.`, the version for each digest that was read.
    """
    for need in feature.reads:
        known = read[need.target.removeprefix("sglang.")]
        if digest(source.definition(need) or "") not in known:
            return (
                f"nobody here has read {need.target} as it is in SGLang {source.version}, and {feature.name} relies on"
                f" it; read: {', '.join(known.values())}; expected one of those, or {UNREAD_FLAG}"
            )
    return None
