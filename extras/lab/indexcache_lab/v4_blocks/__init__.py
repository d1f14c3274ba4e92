"""DeepSeek-V4 whose C4 indexers select for blocks of neighbouring prompt queries.

An entry stands for four tokens, and a query sees those that are complete. A block is Q queries from a multiple of Q on;
its *leader* has the mean of their index queries and gates. All of them attend to the `index_topk` entries that the
leader scores highest among those that its first query sees. Entries that become complete inside the block are left out,
and nothing is given up for them as on DSA models: their tokens are in every query's sliding window (`check_queries`).
Up to `4 x index_topk` tokens everything is selected, and nothing shared.

`definition` says it on transformers' model, `engine` searches and evaluates by that, `selection` does it in SGLang.
"""

from __future__ import annotations

from sglang_indexcache.io.errors import PatternError

RATIO = 4  # tokens of an entry, in layers with an indexer


def check_queries(queries: int, index_topk: int, window: int) -> None:
    """Check that blocks of Q queries fill a selection, and that what they leave out is in their window.

    The first query of a block may see an entry less than the four tokens before it make; the last one is Q - 1 tokens
    behind it.

    Args:
        queries: queries of a block.
        index_topk: entries of a selection.
        window: tokens of the sliding window, the query's own among them.

    Raises:
        PatternError: if not.
    """
    if queries + RATIO - 1 > window:
        raise PatternError(
            f"blocks of {queries} queries reach behind a window of {window} tokens, expected smaller ones"
        )
    if RATIO * index_topk % queries:
        raise PatternError(f"{RATIO * index_topk} tokens are no whole blocks of {queries} queries, expected a divisor")
