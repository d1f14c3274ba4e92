"""Calibration and held-out sets of the demo's data, for any model."""

from __future__ import annotations

from collections.abc import Sequence

from indexcache_search import demo
from indexcache_search.data.packing import build_token_sets
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.hf.loading import describe_model, load_tokenizer, read_config


def demo_sets(
    model: str, seq_len: int, *, calibration: int, held_out: int, sources: Sequence[str] = demo.CALIBRATION
) -> tuple[TokenSet, TokenSet]:
    """Read sets of so many sequences; calibration from `sources`."""
    reader = TokenReader(lambda: load_tokenizer(model), read_config(model).vocab_size, seq_len)
    return build_token_sets(
        reader,
        describe_model(model),
        sources,
        demo.EVALUATION,
        seq_len=seq_len,
        num_calibration=calibration,
        num_evaluation=held_out,
        seed=0,
    )
