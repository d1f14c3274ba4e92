"""Pass a key/value cache to a transformers model under the name that its version uses."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from indexcache_kernels.indexer_forward import CACHE_NAMES
from indexcache_search.errors import SearchError


def cache_argument(model: nn.Module, held: Any) -> dict[str, Any]:
    """Return the keyword argument for `model.forward` that holds a key/value cache.

    Raises:
        SearchError: if `forward` has no argument of a known name.
    """
    takes = inspect.signature(type(model).forward).parameters
    for name in CACHE_NAMES:
        if name in takes:
            return {name: held}
    found = f"{type(model).__name__} of transformers takes {', '.join(takes)}"
    raise SearchError(f"{found}; expected {' or '.join(CACHE_NAMES)} among them")
