"""The grid of offloaded decoding has the batches that memory holds, beside full attention in as much memory."""

from __future__ import annotations

from argparse import Namespace

import pytest
from transformers import AutoConfig

from scripts.bench.lab.offload import batches, resident_batches, token_bytes
from scripts.bench.shapes import config_of

CONFIG = AutoConfig.for_model(**config_of("minicpm4-8b", 131072))  # 32 KiB a token
GIBIBYTES = 2**30


@pytest.mark.parametrize(
    ("context", "memory", "expected"),
    [(16384, None, [16, 64, 128]), (16384, 64, [16, 64, 128]), (16384, 63, [16, 64]), (65536, 32, [16])],
)
def test_batches_are_those_that_host_memory_holds(context: int, memory: int | None, expected: list[int]) -> None:
    assert token_bytes(CONFIG) == 32 * 1024
    assert batches(Namespace(batches="16,64,128", host_memory=memory), context, CONFIG) == expected


def test_full_attention_has_the_memory_of_the_buffers() -> None:
    """Table 5's batches: 16 requests with 4,096 tokens each on the device are 4 of 16K, and one of 96K at the least."""
    options = Namespace(batches="16,32,64,128", host_memory=None, equal_memory=True, buffer=1.0, pages=64)
    assert resident_batches(options, 16384, CONFIG, 60 * GIBIBYTES) == [120, 4, 8, 16, 32]
    assert resident_batches(options, 98304, CONFIG, 9 * GIBIBYTES) == [3, 1, 2]
    options.equal_memory = False
    assert resident_batches(options, 16384, CONFIG, 60 * GIBIBYTES) == [120]
