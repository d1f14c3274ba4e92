"""Cross-layer index sharing for DSA models: patterns, pattern files, and a fork-free SGLang plugin."""

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.model_config import DsaModel
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file import PatternFile

__all__ = ["DsaModel", "IndexCacheError", "Pattern", "PatternFile", "__version__"]

__version__ = "0.1.0"
