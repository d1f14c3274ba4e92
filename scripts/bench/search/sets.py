"""Calibration and held-out sets of the demo's data, for any model."""

from __future__ import annotations

from collections.abc import Sequence

from indexcache_search import demo
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.data.tokens import TokenSet
from indexcache_search.hf.loading import describe_model, load_tokenizer, read_config


def demo_sets(
    model: str, seq_len: int, *, calibration: int, held_out: int, sources: Sequence[str] = demo.CALIBRATION
) -> tuple[TokenSet, TokenSet]:
    """Read sets of so many sequences; calibration from `sources`."""
    reader = TokenReader(lambda: load_tokenizer(model), read_config(model).vocab_size, seq_len)
    packer = Packer(reader, describe_model(model), seq_len)
    evaluation = packer.held_out(demo.EVALUATION, held_out)
    return packer.collect(sources, calibration, 0, "calibration"), evaluation
