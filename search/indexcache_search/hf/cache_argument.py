"""How a model of transformers is given a key/value cache, whatever its version calls it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from indexcache_kernels.indexer_forward import CACHE_NAMES
from indexcache_search.errors import SearchError


def cache_argument(model: nn.Module, held: Any) -> dict[str, Any]:
    """Name a key/value cache as `model` takes it: one keyword argument for its `forward`.

    Raises:
        SearchError: if it takes none by a known name.
    """
    takes = inspect.signature(type(model).forward).parameters
    for name in CACHE_NAMES:
        if name in takes:
            return {name: held}
    kind = type(model).__name__
    raise SearchError(
        f"{kind} of transformers takes {', '.join(takes)}; expected {' or '.join(CACHE_NAMES)} among them"
    )
