"""Cross-layer index sharing for DSA models: patterns, pattern files, and a fork-free SGLang plugin."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # `typing` takes milliseconds to import, in which Python itself would answer Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from sglang_indexcache.families.dsa.override import to_sglang
    from sglang_indexcache.io.errors import IndexCacheError
    from sglang_indexcache.model.layers import ModelLayers
    from sglang_indexcache.pattern import Pattern

    __version__: str
    from sglang_indexcache.pattern_file.file import PatternFile

__all__ = ["IndexCacheError", "ModelLayers", "Pattern", "PatternFile", "__version__", "to_sglang"]

_HOMES = {
    "IndexCacheError": "io.errors",
    "Pattern": "pattern",
    "PatternFile": "pattern_file.file",
    "ModelLayers": "model.layers",
    "to_sglang": "families.dsa.override",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: SGLang loads the plugin from here, and logs imports that fail."""
    if name == "__version__":  # a tree between releases asks git
        return import_module(f"{__name__}.version").version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
