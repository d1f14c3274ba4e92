"""What SGLang's indexers would select among candidates, without SGLang: against the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_indexcache import Pattern
from sglang_indexcache.errors import ProofError
from sglang_indexcache.families.dsa import candidates, placing
from sglang_indexcache.families.dsa.candidates import Choosing, Giving, best_tokens
from sglang_indexcache.families.dsa.needs import DECODING, METHODS, PREFILL
from sglang_indexcache.families.dsa.placing import install, installed
from sglang_indexcache.indexers import Indexer
from tests.served import (
    DIM,
    HEADS,
    PAGED,
    RAGGED,
    TOPK,
    UNFUSED,
    Metadata,
    SglangIndexer,
    index_scores,
    sglang_modules,
)

__all__ = ["sglang_modules"]


@pytest.mark.parametrize("at_a_time", [1 << 20, 100])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_the_best_tokens(tokens: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row does not see is anything, NaN too."""
    monkeypatch.setattr(candidates, "_SCORES", at_a_time)
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randn(30, 50, generator=generator)
    starts = torch.randint(0, 20, (30,), generator=generator).int()
    lengths = torch.randint(0, 31, (30,), generator=generator).int()
    column = torch.arange(50)
    scores[(column < starts[:, None]) | (column >= (starts + lengths)[:, None])] = float("nan")
    found = best_tokens(scores, starts, lengths, tokens)
    assert found.dtype == torch.int32 and found.shape == (30, tokens)
    for row, start, length, chosen in zip(scores, starts.tolist(), lengths.tolist(), found.tolist(), strict=True):
        kept = [token for token in chosen if token >= 0]
        assert chosen == [*kept, *[-1] * (tokens - len(kept))] and kept == sorted(set(kept))
        best = row[start : start + length].topk(min(tokens, length)).values.sort().values
        assert torch.equal(row[start : start + length][kept].sort().values, best)
    assert torch.equal(
        best_tokens(scores[:, 10:], None, (starts + lengths - 10).clamp_min(0), 4)[starts == 10],
        best_tokens(scores, starts, lengths, 4)[starts == 10],
    )


def placed(letters: str, keys: list[Tensor]) -> list[SglangIndexer]:
    """Indexers of a pattern's layers, each with keys of its own."""
    indexers = [SglangIndexer(item) for item in keys]
    modules = [SimpleNamespace(indexer=indexer) for indexer in indexers]
    pattern = Pattern.parse(letters)
    install(enumerate(modules), pattern)
    assert tuple(installed(enumerate(modules))) == pattern.indexers
    return indexers


@pytest.mark.parametrize("kind", [PAGED, RAGGED, UNFUSED])
@pytest.mark.parametrize("chunk", [None, 37])
@pytest.mark.parametrize("given", [True, False])
def test_prompts_select_among_candidates(
    kind: str, chunk: int | None, given: bool, sglang_modules: dict[int, Any]
) -> None:
    """Of three requests, two with a prefix; two layers choose from one, with other counts; a second F layer gives."""
    torch.manual_seed(0)
    prefixes, lengths = [0, 70, 128], [200, 300, 1]
    metadata = Metadata(prefixes, lengths, kind)
    keys = [torch.randn(sum(metadata.totals), DIM) for _ in range(5)]
    indexers = placed("FCCFC+1c2+2c3+4c2", keys)
    q, w = torch.randn(5, metadata.rows + 3, HEADS, DIM), torch.rand(5, metadata.rows + 3, HEADS, 1)
    batch, found = SimpleNamespace(), []
    for layer, indexer in enumerate(indexers):
        indexer.chunk = chunk
        sglang_modules[layer] = indexer, metadata
        buffer = torch.full((len(q[layer]), TOPK), -1, dtype=torch.int32) if given else None
        found.append(indexer._get_topk_ragged(False, batch, layer, q[layer], w[layer], metadata, buffer))
        assert buffer is None or found[layer] is buffer
        assert (found[layer][metadata.rows :] == -1).all()
    for layer, giver, count in ((1, 0, 2), (2, 0, 3), (4, 3, 2)):
        row = 0
        for number, (prefix, length) in enumerate(zip(prefixes, lengths, strict=True)):
            base, total = metadata.bases[number], metadata.totals[number]
            for at in range(length):
                position = prefix + at
                scores = [
                    index_scores(q[item, [row]], w[item, [row]], keys[item][base : base + total])[0, : position + 1]
                    for item in (giver, layer)
                ]
                assert set(found[layer][row].tolist()) - {-1} == translated(
                    metadata, number, among(*scores, count), kind
                )
                row += 1
    plain = SglangIndexer(keys[0])._get_topk_ragged(False, batch, 0, q[0], w[0], metadata)
    assert torch.equal(found[0], plain)  # who gives selects as ever


@pytest.mark.parametrize("kind", [PAGED, UNFUSED])
def test_decoded_tokens_select_among_candidates(kind: str, sglang_modules: dict[int, Any]) -> None:
    """With rows of padding; short requests see all that there is."""
    torch.manual_seed(0)
    totals = [5, 200, 90, 17]
    metadata = Metadata([total - 1 for total in totals], [1] * len(totals), kind)
    keys = [torch.randn(sum(totals), DIM) for _ in range(3)]
    indexers = placed("FSC+2c2", keys)
    q, w, batch = torch.randn(3, 6, HEADS, DIM), torch.rand(3, 6, HEADS, 1), SimpleNamespace()
    for layer in (0, 2):
        sglang_modules[layer] = indexers[layer], metadata
        found = indexers[layer]._get_topk_paged(batch, layer, q_fp8=q[layer], weights=w[layer], metadata=metadata)
    assert found.shape == (6, TOPK) and (found[4:] == -1).all()
    for row, (base, total) in enumerate(zip(metadata.bases, totals, strict=True)):
        scores = [index_scores(q[item, [row]], w[item, [row]], keys[item][base : base + total])[0] for item in (0, 2)]
        assert set(found[row].tolist()) - {-1} == translated(metadata, row, among(*scores, 2), kind)


def among(given: Tensor, own: Tensor, count: int) -> Tensor:
    """The positions that `own` scores highest of those that `given` does."""
    chosen = given.topk(min(len(given), count * TOPK)).indices
    return chosen[own[chosen].topk(min(len(chosen), TOPK)).indices]


def translated(metadata: Metadata, request: int, positions: Tensor, kind: str) -> set[int]:
    if kind == RAGGED:
        positions = positions + metadata.bases[request]
    elif kind == PAGED:
        positions = metadata.attn_metadata.page_table_1[request, positions]
    return set(positions.tolist())


def test_nothing_given_ends_the_process(sglang_modules: dict[int, Any], capsys: pytest.CaptureFixture[str]) -> None:
    metadata = Metadata([0], [100], PAGED)
    first, second, third = placed("FFC+2c2", [torch.randn(100, DIM) for _ in range(3)])
    q, w = torch.randn(100, HEADS, DIM), torch.rand(100, HEADS, 1)
    sglang_modules[2] = third, metadata
    some = torch.zeros(100, 32).int()
    for given in ({}, {"_indexcache_candidates": (0, {2: some})}, {"_indexcache_candidates": (1, {3: some})}):
        batch = SimpleNamespace(**given)
        first._get_topk_ragged(False, batch, 0, q, w, metadata)
        with pytest.raises(SystemExit) as end:
            third._get_topk_ragged(False, batch, 2, q, w, metadata)
        line = "letter 2 chooses from what letter 1 scored highest, which gave nothing in this forward pass"
        assert end.value.code == 2 and line in capsys.readouterr().err
    second._get_topk_ragged(False, batch, 1, q, w, metadata)
    assert third._get_topk_ragged(False, batch, 2, q, w, metadata).shape == (100, TOPK)
    with pytest.raises(RuntimeError):  # shapes that SGLang's method does not take
        second._get_topk_ragged(False, batch, 1, q[:, :3], w, metadata)


@pytest.mark.usefixtures("sglang_modules")
def test_an_unknown_cache_ends_the_process(
    sglang_modules: dict[int, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, batch = Metadata([0], [100], PAGED), SimpleNamespace()
    first, second = placed("FC+1c2", [torch.randn(100, DIM) for _ in range(2)])
    q, w = torch.randn(100, HEADS, DIM), torch.rand(100, HEADS, 1)
    first._get_topk_ragged(False, batch, 0, q, w, metadata)
    monkeypatch.setattr(SglangIndexer, "_get_index_k_read_buffer", staticmethod(lambda *_: torch.zeros(9, 64)))
    with pytest.raises(SystemExit):
        second._get_topk_ragged(False, batch, 1, q, w, metadata)
    assert "index keys are [9, 64] of torch.float32, expected 288 bytes for each page" in capsys.readouterr().err


@pytest.mark.usefixtures("sglang_modules")
def test_what_is_read_back_and_what_is_refused() -> None:
    def modules(*indexers: Any) -> list[tuple[int, Any]]:
        return list(enumerate(SimpleNamespace(indexer=indexer) for indexer in indexers))

    def indexer() -> SglangIndexer:
        return SglangIndexer(torch.zeros(1, DIM))

    first, second = indexer(), indexer()
    install(modules(first, second), Pattern.parse("FC+1c2"))
    assert list(installed(modules(first, second))) == [Indexer(layer=1, candidates=2)]
    assert placing.chooses(SimpleNamespace(indexer=second)) and not placing.chooses(SimpleNamespace(indexer=first))
    for layer, item, line in (
        (0, indexer(), "letter 1 chooses from what letter 0 scored highest, which gives nothing"),
        (0, Giving(first, DECODING, 0, [3]), "letter 1 chooses from what letter 0 scored highest, which gives nothing"),
        (1, None, "letter 1 selects by Choosing, expected SGLang's own methods"),
        (1, print, "letter 1 selects by Choosing, builtin_function_or_method, expected SGLang's own methods"),
    ):
        one, two = indexer(), indexer()
        install(modules(one, two), Pattern.parse("FC+1c2"))
        if isinstance(item, SglangIndexer):
            one = item
        else:
            setattr((one, two)[layer], DECODING, item)
        with pytest.raises(ProofError, match=line):
            list(installed(modules(one, two)))

    for missing in ({0}, {1}):  # a pipeline stage with one of them
        stage = [item for item in modules(indexer(), indexer()) if item[0] not in missing]
        if missing == {1}:
            install(stage, Pattern.parse("FC+1c2"))
            assert not list(installed(stage))
        else:
            with pytest.raises(ProofError, match="what letter 0 scored highest, which is in another pipeline stage"):
                install(stage, Pattern.parse("FC+1c2"))
    local, other = indexer(), type("Other", (SglangIndexer,), {PREFILL: lambda self: None})(torch.zeros(1, DIM))
    local.num_local_tokens = 4
    for refused, line in (
        (local, "always selects the first or last tokens"),
        (other, "Other selects in a way of its own"),
    ):
        with pytest.raises(ProofError, match=line):
            install(modules(indexer(), refused), Pattern.parse("FC+1c2"))
        with pytest.raises(ProofError, match=line):
            install(modules(refused, indexer()), Pattern.parse("FC+1c2"))
    with pytest.raises(ProofError, match="letter 0 selects for 64 queries at a time, expected at most index_topk"):
        install(modules(indexer(), indexer()), Pattern.parse("FF+0q64"))
    assert all(isinstance(vars(second)[method], Choosing) for method in METHODS)
