"""What a calibration server measures, on made-up forward passes: where rows are, sums, memory, intersections."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_indexcache.calibration.divergence import Divergence, Rows, kl_rows, limit_gb
from sglang_indexcache.calibration.lm_head import around_logits
from sglang_indexcache.calibration.overlap import Overlap, common_indices
from sglang_indexcache.calibration.passes import parts
from sglang_indexcache.calibration.preflight import CalibrationError
from sglang_indexcache.calibration.protocol import KEEP, KL, OVERLAP, Measured

HIDDEN, VOCAB, LENGTH = 4, 11, 30
HEAD = torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(0))
Request = tuple[str, int, int, int]  # id, first position, tokens, where logprobs begin among them


def forward_batch(requests: Sequence[Request], extend: bool = True) -> Any:
    rids, firsts, tokens, starts = (list(column) for column in zip(*requests, strict=True))
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        rids=rids,
        extend_prefix_lens_cpu=firsts,
        extend_seq_lens_cpu=tokens,
        extend_logprob_start_lens_cpu=starts,
    )


def hidden(sequence: int, first: int, last: int, shift: float = 0.0) -> Tensor:
    return torch.stack([torch.sin(torch.arange(HIDDEN) + 7.0 * sequence + row + shift) for row in range(first, last)])


def run(divergence: Divergence, requests: Sequence[Request], states: Tensor, chunk: int = 5) -> Tensor:
    """A pass as SGLang makes it: logits of the scored rows, in chunks."""

    def get_logits(rows: Tensor, head: Tensor, use_logits_buffer: bool = True) -> Tensor:
        return rows @ head

    def logprobs(processor: None, pruned_states: Tensor, lm_head: Tensor, get_logits_fn: Any) -> Tensor:
        return torch.cat([get_logits_fn(rows, lm_head, use_logits_buffer=True) for rows in pruned_states.split(chunk)])

    divergence.begin_pass(forward_batch(requests))
    found: Tensor = divergence.around_logprobs(
        logprobs, None, pruned_states=states, lm_head=HEAD, get_logits_fn=get_logits
    )
    return found


def expected_kl(sequence: int, rows: Sequence[int], shift: float) -> list[float]:
    found = []
    for row in rows:
        truth = (hidden(sequence, row, row + 1).double() @ HEAD.double()).log_softmax(-1)
        own = (hidden(sequence, row, row + 1, shift).double() @ HEAD.double()).log_softmax(-1)
        found.append((truth.exp() * (truth - own)).sum().item())
    return found


def test_request_ids() -> None:
    measured = Measured(KL, 12, "data", "abc")
    assert Measured.parse(measured.rid) == measured
    assert Measured.new(KL, 12, "0123456789abcdef" * 4).data == "0123456789abcdef"
    for rid in ("abc", "indexcache:kl:1:x", "indexcache::1:d:x", "indexcache:kl:one:d:x", "other:kl:1:d:x"):
        assert Measured.parse(rid) is None


def test_where_the_requests_of_a_pass_are() -> None:
    found = list(parts(forward_batch([("a", 0, 10, 4), ("indexcache:kl:3:data:n", 20, 5, 5)])))
    assert [(part.row, part.first, part.tokens, part.scored) for part in found] == [(0, 0, 10, 6), (10, 20, 5, 1)]
    assert found[0].measured is None and found[1].measured == Measured(KL, 3, "data", "n")
    assert list(parts(forward_batch([("a", 0, 1, 0)], extend=False))) == []


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("pieces", [[30], [7, 20, 3], [10, 10, 10]])
def test_divergence_of_two_requests_in_one_pass(chunk: int, pieces: list[int]) -> None:
    """Prefill in pieces, logits in chunks, an ordinary request between; sums over several ranges."""
    divergence = Divergence(1)
    ranges = [(8, 29), (8, 29)]
    assert divergence.announce("data", ranges, 2 * HIDDEN) == [0, 1]
    for what, shift in ((KEEP, 0.0), (KL, 0.3)):
        divergence.switched(what == KEEP)
        first = 0
        for piece in pieces:
            start = min(max(8 - first, 0), piece)
            begin = first + min(start, piece - 1)  # one row is always there, for the next token
            requests = [
                (f"indexcache:{what}:0:data:n", first, piece, start),
                ("other", first, piece, start),
                (f"indexcache:{what}:1:data:n", first, piece, start),
            ]
            stop = first + piece
            states = torch.cat([hidden(sequence, begin, stop, shift) for sequence in (0, 9, 1)])
            found = run(divergence, requests, states, chunk)
            assert torch.equal(found, torch.cat([rows @ HEAD for rows in states.split(chunk)]))
            first = stop
        if what == KEEP:
            assert divergence.announce("data", ranges, 2 * HIDDEN) == []
    sums = divergence.sums({"indexcache:kl:0:data:n": [(8, 12), (20, 29)], "indexcache:kl:1:data:n": [(28, 29)]})
    for sequence, rows in ((0, [*range(8, 12), *range(20, 29)]), (1, [28])):
        values = expected_kl(sequence, rows, 0.3)
        total, squares, count = sums[f"indexcache:kl:{sequence}:data:n"]
        assert total == pytest.approx(sum(values), rel=1e-5) and count == len(rows)
        assert squares == pytest.approx(sum(value * value for value in values), rel=1e-5)
    with pytest.raises(CalibrationError, match="no divergence for indexcache:kl:0:data:n"):
        divergence.sums({"indexcache:kl:0:data:n": [(8, 12)]})


def keep(divergence: Divergence, sequence: int = 0) -> None:
    run(divergence, [(f"indexcache:keep:{sequence}:data:n", 0, LENGTH, 8)], hidden(sequence, 8, LENGTH))


def test_a_baseline_is_only_what_ran_with_the_baseline_s_pattern() -> None:
    divergence = Divergence(1)
    divergence.announce("data", [(8, 29)], 8)
    divergence.switched(False)
    keep(divergence)
    assert divergence.announce("data", [(8, 29)], 8) == [0]
    run(divergence, [("indexcache:kl:0:data:n", 0, LENGTH, 8)], hidden(0, 8, LENGTH))
    with pytest.raises(CalibrationError, match="not run, or without a baseline"):
        divergence.sums({"indexcache:kl:0:data:n": [(8, 29)]})


def test_requests_of_another_data_set_measure_nothing() -> None:
    """A client that slept while another took its place sends the rest of its baseline: it must not become theirs."""
    divergence = Divergence(1)
    divergence.announce("theirs", [(8, 29)], 8)
    run(divergence, [("indexcache:keep:0:theirs:n", 0, LENGTH, 8)], hidden(0, 8, LENGTH))
    run(divergence, [("indexcache:keep:0:data:n", 0, LENGTH, 8)], hidden(7, 8, LENGTH))
    divergence.switched(False)
    run(divergence, [("indexcache:kl:0:data:m", 0, LENGTH, 8)], hidden(7, 8, LENGTH, 0.3))
    run(divergence, [("indexcache:kl:0:theirs:n", 0, LENGTH, 8)], hidden(0, 8, LENGTH, 0.3))
    with pytest.raises(CalibrationError, match="busy: another data set was announced meanwhile"):
        divergence.sums({"indexcache:kl:0:data:m": [(8, 29)]})
    total, _, _ = divergence.sums({"indexcache:kl:0:theirs:n": [(8, 29)]})["indexcache:kl:0:theirs:n"]
    assert total == pytest.approx(sum(expected_kl(0, range(8, 29), 0.3)), rel=1e-5)


def test_baselines_of_another_data_set_are_forgotten() -> None:
    divergence = Divergence(1)
    divergence.announce("data", [(8, 29)], 8)
    keep(divergence)
    assert divergence.announce("data", [(8, 29)], 8) == []
    assert divergence.announce("data", [(9, 29)], 8) == [0]
    keep(divergence)
    assert divergence.announce("other", [(9, 29)], 8) == [0]
    keep(divergence, sequence=7)  # never announced
    assert divergence.announce("other", [(9, 29)], 8) == [0]


def test_divergences_of_an_earlier_pattern_are_forgotten() -> None:
    divergence = Divergence(1)
    divergence.announce("data", [(8, 29)], 8)
    keep(divergence)
    run(divergence, [("indexcache:kl:0:data:n", 0, LENGTH, 8)], hidden(0, 8, LENGTH))
    divergence.switched(False)
    with pytest.raises(CalibrationError, match="not run"):
        divergence.sums({"indexcache:kl:0:data:n": [(8, 29)]})


def test_too_much_memory_is_refused_before_anything_runs() -> None:
    with pytest.raises(CalibrationError, match=r"take 25\.8 GB of host memory on each rank, allowed are 16"):
        Divergence(16).announce("data", [(2048, 32768)] * 64, 2 * 6144 * 32768 // 30720 + 1)


def test_memory_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_gb() == 32
    monkeypatch.setenv("SGLANG_INDEXCACHE_KL_GB", "0.5")
    assert limit_gb() == 0.5
    for text in ("much", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("SGLANG_INDEXCACHE_KL_GB", text)
        with pytest.raises(CalibrationError, match="expected a number of gigabytes"):
            limit_gb()


def test_a_broken_model_gives_no_number() -> None:
    divergence = Divergence(1)
    divergence.announce("data", [(8, 29)], 8)
    keep(divergence)
    run(divergence, [("indexcache:kl:0:data:n", 0, LENGTH, 8)], hidden(0, 8, LENGTH) * float("nan"))
    assert divergence.sums({"indexcache:kl:0:data:n": [(8, 29)]}) == {"indexcache:kl:0:data:n": (None, None, 21)}


def test_the_lm_head_hook_leaves_float32_and_cpu_alone() -> None:
    """And tells the divergence whose tokens they are."""
    divergence, seen = Divergence(1), []

    def logits(processor: None, lm_head: Any, logits_metadata: Any) -> str:
        seen.append((torch.get_float32_matmul_precision(), len(divergence._parts)))
        return "logits"

    for weight in (torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)):
        hook = partial(around_logits, divergence)
        assert hook(logits, None, SimpleNamespace(weight=weight), forward_batch([("a", 0, 3, 0)])) == "logits"
    on_gpu = SimpleNamespace(weight=SimpleNamespace(is_cuda=True, dtype=torch.bfloat16))
    around_logits(None, logits, None, on_gpu, SimpleNamespace())
    around_logits(divergence, logits, None, SimpleNamespace(), SimpleNamespace())
    assert seen == [("highest", 1), ("highest", 1), ("high", 1), ("highest", 0)]
    assert torch.get_float32_matmul_precision() == "highest"


def test_rows_with_a_hole_are_not_there() -> None:
    rows = Rows()
    rows.add(0, torch.arange(3))
    rows.add(5, torch.arange(5, 9))
    assert rows.take(0, 4) is None and rows.take(2, 6) is None and rows.take(8, 10) is None
    found = rows.take(6, 8)
    assert found is not None and torch.cat(found).tolist() == [6, 7]
    rows.add(1, torch.arange(1, 4))  # run again
    assert rows.take(0, 2) is None and rows.take(1, 4) is not None


def test_kl_of_many_rows_is_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    expected, own = (torch.randn(600, 50, generator=generator) for _ in range(2))
    truth = expected.double().log_softmax(-1)
    wanted = (truth.exp() * (truth - own.double().log_softmax(-1))).sum(-1)
    assert torch.allclose(kl_rows(expected, own).double(), wanted, rtol=1e-5)
    assert kl_rows(expected, expected).abs().max() == 0


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
