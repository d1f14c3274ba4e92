"""Counts of tokens or pages that decode steps copy to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from indexcache_dense.selection import Selection, selection_in
from indexcache_lab.offload.advice import selecting_layers
from indexcache_lab.offload.counted import misses_on
from indexcache_lab.offload.lru_buffer import hisparse_misses, page_misses
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.sglang import SglangEngine
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.evaluation.journal import Journal
from sglang_indexcache import Pattern


def count_misses(
    engine: TransformersEngine | SglangEngine,
    data: TokenSet,
    journal: Journal,
    pattern: Pattern,
    *,
    sizes: Sequence[int],
    steps: int,
    done: Callable[[], None] = lambda: None,
) -> NDArray[np.int64]:
    """Count misses of the last `steps` tokens of each sequence, as if these were decoded.

    Args:
        engine: runs the model.
        data: sequences, more than `steps` longer than a selection. For dense models the other tokens are a prompt.
        journal: keeps earlier counts; its identity includes the data, of which only these tokens are scored.
        pattern: decides which layers select.
        sizes: of buffers, a layer and request: in tokens, or for dense models in pages.
        steps: decode steps.
        done: called after every sequence.

    Returns:
        `[sequences, sizes, layers]`: tokens, or for dense models pages, of the selecting layers, in order. A layer that
        shares a selection misses the same. With `heads: key` each key head has a buffer and pages of its own, whose
        misses are added up.
    """
    layers, counted = selecting_layers(pattern), []
    if not layers:
        return np.zeros((data.num_sequences, len(sizes), 0), np.int64)
    for row in range(data.num_sequences):
        name = f"misses {pattern.key} {list(sizes)} {row}"
        known = journal.matrix(name)
        if known is None:
            if isinstance(engine, SglangEngine):  # the server counts, since selections are large
                found = misses_on(engine, pattern, data, row, steps=steps, sizes=sizes)
            else:
                selected = engine.selections(pattern, data, row, steps)
                found = {
                    layer: [
                        sum(_misses(own, size, data.seq_len, selection_in(pattern)) for own in selected[layer])
                        for size in sizes
                    ]
                    for layer in layers
                }
            known = [[float(found[layer][number]) for layer in layers] for number in range(len(sizes))]
            journal.add_matrix(name, known)
        counted.append(known)
        done()
    return np.asarray(counted).astype(np.int64)


def _misses(selected: NDArray[np.int32], size: int, tokens: int, selection: Selection | None) -> int:
    """Count misses of one layer's selections, `[steps, k]`, or of its key head's; `tokens` is the final length."""
    first = tokens - len(selected)
    if selection is not None:
        return page_misses(selected, size, [at // selection.page_tokens for at in range(first, tokens)])
    return sum(hisparse_misses(((row, first + number + 1) for number, row in enumerate(selected)), size, first))
