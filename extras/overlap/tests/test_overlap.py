"""Index overlap on made-up forward passes, and as a search asks servers for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from indexcache_overlap.client import Overlap as OnServers
from indexcache_overlap.measure import OVERLAP, Overlap, common_indices
from indexcache_search.engines.sglang import ServerMatrix
from sglang_indexcache.calibration.measure import Measure
from sglang_indexcache.calibration.preflight import CalibrationError
from sglang_indexcache.calibration.protocol import Measured
from sglang_indexcache.io.extensions import extensions
from tests.search.test_measuring import forward_batch


def test_servers_and_searches_find_it() -> None:
    assert extensions("measures", Measure)[OVERLAP] is Overlap
    assert isinstance(extensions("server_matrices", ServerMatrix)[OVERLAP], OnServers)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """SGLang's place for a capturer."""
    place: list[Any] = []
    module = SimpleNamespace(set_global_indexer_capturer=place.append)
    for name in ("sglang", "sglang.srt", "sglang.srt.state_capturer"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.state_capturer.indexer_topk", module)
    yield place


def test_overlap_on_sampled_rows(registered: list[Any]) -> None:
    """Two passes of a request after an ordinary one; only rows 9 and 13 count."""
    generator = torch.Generator().manual_seed(2)
    indices = torch.stack(
        [torch.stack([torch.randperm(20, generator=generator)[:6] for _ in range(16)]) for _ in range(3)]
    )
    overlap = Overlap()
    overlap.begin([9, 13], layers=3)
    assert registered == [overlap]
    for first, last in ((0, 10), (10, 16)):
        requests = [("other", 0, 4, 0), (Measured(OVERLAP, 0, "data", "n").rid, first, last - first, 0)]
        overlap.before_forward(SimpleNamespace(device="cpu"), forward_batch(requests))
        for layer in range(3):
            rows = torch.cat([torch.zeros(4, 6, dtype=torch.long), indices[layer, first:last]])
            overlap.capture(layer_id=layer, topk_indices=rows.int())
    found = overlap.end()
    assert registered[-1] is None and found["queries"] == 2
    for one in range(3):
        for two in range(3):
            shares = [len(set(indices[one, row].tolist()) & set(indices[two, row].tolist())) / 6 for row in (9, 13)]
            assert found["overlap"][one][two] == pytest.approx(sum(shares) / 2)


def test_nothing_sampled_is_an_error(registered: list[Any]) -> None:
    overlap = Overlap()
    overlap.begin([5], layers=2)
    overlap.before_forward(SimpleNamespace(device="cpu"), forward_batch([("other", 0, 10, 0)]))
    overlap.capture(layer_id=0, topk_indices=torch.zeros(10, 4, dtype=torch.int32))
    with pytest.raises(CalibrationError, match="no query was sampled"):
        overlap.end()


def test_missing_indices_are_common_to_no_one() -> None:
    sets = torch.tensor([[[-1, -1, 3, 5]], [[-1, 3, 4, 5]]])
    assert common_indices(sets).tolist() == [[[2, 2], [2, 3]]]
