"""Selections of SGLang's index spaces as positions, without SGLang."""

from __future__ import annotations

import pytest
import torch

from indexcache_kernels.prompt_blocks.naive import translate
from indexcache_lab.offload.positions import positions_of
from sglang_indexcache.families.dsa.blocks.index_space import index_space
from sglang_indexcache.io.errors import ProofError
from tests.served import PAGED, RAGGED, TOPK, UNFUSED, Metadata, sglang_modules

__all__ = ["sglang_modules"]
pytestmark = pytest.mark.usefixtures("sglang_modules")


@pytest.mark.parametrize("kind", [PAGED, RAGGED, UNFUSED])
def test_positions_come_back_from_every_index_space(kind: str) -> None:
    """Of rows of three requests, with places that are empty; what no row sees is refused."""
    torch.manual_seed(1)
    prefixes, lengths = [0, 70, 128], [200, 300, 1]
    metadata = Metadata(prefixes, lengths, kind)
    rows = torch.tensor([3, 199, 200, 321, 499, 500])
    requests = metadata.requests[rows].long()
    positions = torch.full((len(rows), TOPK), -1, dtype=torch.int32)
    for row, length in zip(positions, metadata.lengths[rows].tolist(), strict=True):
        chosen = torch.randperm(length)[:TOPK]
        row[: len(chosen)] = chosen.int()
    selected = translate(positions, index_space(metadata, rows, requests.int()))
    assert kind == UNFUSED or not torch.equal(selected, positions)
    assert torch.equal(positions_of(metadata, selected, rows, requests), positions)
    after = translate(metadata.lengths[rows[:1], None], index_space(metadata, rows[:1], requests[:1].int()))
    for wrong in (999_999, int(after)):
        other = selected.clone()
        other[0, 0] = wrong  # nobody's, and the token behind the query
        with pytest.raises(ProofError, match="a query selects what is no token before it"):
            positions_of(metadata, other, rows, requests)
