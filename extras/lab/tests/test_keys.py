"""Plans for keys on transformers: bits where nothing changes, decoding as it is for real, counts by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from extras.dense.tests.test_pages import KINDS, dense_model
from indexcache_lab.kernels.key_delta import kept_keys
from indexcache_lab.key_delta import attention as keys
from indexcache_lab.key_delta.attention import KeyDeltaCache, apply_key_plan, chosen_blocks, rounded
from indexcache_lab.key_delta.engine import KeyEngine
from indexcache_lab.key_delta.plan import KeyMethod, KeyPlan, Stage
from indexcache_search.data.tokens import TokenSet
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.journal import Journal
from sglang_indexcache.families import describe
from sglang_indexcache.io.errors import PatternError
from tests.conftest import LAYERS, tiny_dense_config, tiny_model

LENGTH, PROMPT, VOCAB = 70, 40, 96
NOTHING: dict[KeyMethod, float] = {"key_delta": 0.0, "key_bits": 16.0, "sink_window": 70.0, "key_blocks": 1.0}


def key_engine(**options: Any) -> KeyEngine:
    config = tiny_dense_config()
    return KeyEngine(tiny_model(config), describe(config, "tiny"), **options)


def plan(method: KeyMethod, *values: float, **near: Any) -> KeyPlan:
    return KeyPlan(method=method, values=values * LAYERS if len(values) == 1 else values, **near)


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def prompt_rows(*lengths: int) -> Tensor:
    return torch.arange(LENGTH) < torch.tensor(lengths)[:, None]


@torch.inference_mode()
def logits(model: Any, asked: KeyPlan | None, read: Tensor | None = None, rows: int = 2) -> Tensor:
    if asked is None:
        model.set_attn_implementation("eager")
        return torch.as_tensor(model(input_ids=tokens(rows), use_cache=False).logits)
    with apply_key_plan(model, asked, read):
        return torch.as_tensor(model(input_ids=tokens(rows), use_cache=False).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", NOTHING)
def test_a_plan_that_changes_nothing_is_transformers_bit_for_bit(kind: str, method: KeyMethod) -> None:
    model = dense_model(kind)
    read = prompt_rows(PROMPT, LENGTH)
    expected = logits(model, None)
    assert torch.equal(logits(model, plan(method, NOTHING[method]), read), expected)
    some = {"key_delta": 0.5, "key_bits": 3.0, "sink_window": 9.0, "key_blocks": 0.3}[method]
    last = plan(method, *[NOTHING[method]] * (LAYERS - 1), some)
    assert not torch.equal(logits(model, last, read), expected)
    assert torch.equal(logits(model, None), expected)  # undone


def test_a_smallest_threshold_keeps_all_keys_bit_for_bit() -> None:
    """Not by looking away from the differences, as for 0: every number moves by more than this."""
    model = dense_model()
    assert torch.equal(logits(model, plan("key_delta", 1e-30)), logits(model, None))


class Seen:
    """What layers computed with, by hand: the kept keys of each layer and the scores of each query."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[Tensor] = []
        original = keys._scores

        def watched(state: Any, layer: int, query: Tensor, key: Tensor, scaling: float) -> Tensor:
            scores = original(state, layer, query, key, scaling)
            self.keys.append(key)
            self._check(state.plan, state.read, layer, query, key, scaling, scores)
            return scores

        monkeypatch.setattr(keys, "_scores", watched)

    def _check(
        self, asked: KeyPlan, read: Tensor, layer: int, query: Tensor, key: Tensor, scaling: float, scores: Tensor
    ) -> None:
        kept, _ = kept_keys(key, asked.values[layer])
        for row in range(len(query)):
            square = max(1, int(asked.window * int(read[row].sum())))
            for position in (0, 3, 17, PROMPT - 1, PROMPT, LENGTH - 1):
                for other in range(position + 1):
                    if read[row, position]:
                        near = position // square == other // square
                    else:
                        near = position - other < asked.recent
                    used = (key if near else kept)[row, :, other].repeat_interleave(2, 0)
                    product = (query[row, :, position] * used).sum(1) * scaling
                    torch.testing.assert_close(scores[row, :, position, other], product, atol=1e-5, rtol=1e-5)


def test_squares_while_reading_and_last_keys_while_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equations 2 to 5, for a prompt with a reply, and for a text that is read whole."""
    seen = Seen(monkeypatch)
    asked = plan("key_delta", *np.linspace(0.1, 1.5, LAYERS).tolist(), window=0.2, recent=5)
    logits(dense_model(), asked, prompt_rows(PROMPT, LENGTH))
    assert len(seen.keys) == LAYERS


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_with_a_cache_of_differences_is_what_one_pass_computes(kind: str) -> None:
    model = dense_model(kind)
    asked = plan("key_delta", 0.0, 0.3, 0.6, 1.0, 0.3, 2.0, window=0.2)
    expected = logits(model, asked, prompt_rows(PROMPT), rows=1)[0]
    cache = KeyDeltaCache(asked)
    with torch.inference_mode(), apply_key_plan(model, asked, cache=cache):
        pieces = [model(input_ids=tokens(1)[:, :PROMPT], past_key_values=cache, use_cache=True).logits[0]]
        for position in range(PROMPT, LENGTH):
            step = model(input_ids=tokens(1)[:, position : position + 1], past_key_values=cache, use_cache=True)
            pieces.append(step.logits[0])
    torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-4, rtol=1e-4)
    for layer, held in enumerate(cache.layers):
        if layer == 0:
            assert not hasattr(held, "fresh")  # keys, not differences
            continue
        assert held.recent.shape[2] == asked.recent and (held.keys == 0).float().mean() > 0.02
        torch.testing.assert_close(held.keys.cumsum(2)[:, :, -1], held.kept, atol=1e-5, rtol=1e-5)


def test_kept_keys_of_the_cache_are_those_of_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first layer, up to how its projection rounds for one token or for many; given keys, see test_key_delta."""
    model = dense_model()
    asked = plan("key_delta", 0.5, *[0.0] * (LAYERS - 1))
    seen: list[Tensor] = []
    original = keys._scores
    monkeypatch.setattr(keys, "_scores", lambda *given: seen.append(given[3]) or original(*given))
    logits(model, asked, prompt_rows(PROMPT), rows=1)
    whole, _ = kept_keys(seen[0], 0.5)
    cache, kept = KeyDeltaCache(asked), []
    with torch.inference_mode(), apply_key_plan(model, asked, cache=cache):
        for piece in (tokens(1)[:, :PROMPT], *tokens(1)[:, PROMPT:].split(1, 1)):
            model(input_ids=piece, past_key_values=cache, use_cache=True)
            kept.append(cache.layers[0].kept)
    torch.testing.assert_close(torch.stack(kept, 2), whole[:, :, PROMPT - 1 :], atol=1e-5, rtol=0)
    assert kept[0].ne(seen[0][:, :, PROMPT - 1]).any()


def test_generate_takes_the_cache() -> None:
    model, asked = dense_model(), plan("key_delta", 0.4)
    cache = KeyDeltaCache(asked)
    with apply_key_plan(model, asked, cache=cache):
        ids = model.generate(
            tokens(1)[:, :20], past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    assert ids.shape == (1, 28) and cache.get_seq_length() == 27
    with torch.inference_mode(), apply_key_plan(model, asked, torch.arange(27)[None] < 20):
        again = model(input_ids=ids[:, :27], use_cache=False).logits[0]
    assert torch.equal(again[19:].argmax(-1), ids[0, 20:])


def test_bits_are_steps_between_the_least_and_the_largest_of_32_tokens() -> None:
    k = torch.randn(2, 3, 70, 8, generator=torch.Generator().manual_seed(5))
    for bits in (2, 4, 8):
        near = rounded(k, bits)
        for first in (0, 32, 64):
            group, result = k[:, :, first : first + 32], near[:, :, first : first + 32]
            span = group.amax(2) - group.amin(2)
            assert ((group - result).abs() <= span[:, :, None] / (2**bits - 1) / 2 + 1e-6).all()
            values = result.transpose(2, 3).flatten(0, 2)
            assert max(len(row.unique()) for row in values) <= 2**bits


def test_blocks_are_the_best_by_their_mean_key() -> None:
    generator = torch.Generator().manual_seed(6)
    key, query = torch.randn(1, 2, 150, 8, generator=generator), torch.randn(1, 4, 150, 8, generator=generator)
    share = 0.4
    looks = chosen_blocks(query, key, share)
    for position in (0, 15, 16, 47, 48, 149):
        own = position // 16
        for head in range(2):
            scores = {}
            for block in range(own + 1):
                mean = key[0, head, block * 16 : block * 16 + 16].mean(0)
                scores[block] = float((query[0, 2 * head : 2 * head + 2, position].sum(0) * mean).sum())
            always = {block for block in (0, own - 1, own) if block >= 0}
            wanted = max(3, int(np.ceil((own + 1) * share - 1e-6)))
            others = sorted((block for block in scores if block not in always), key=lambda block: -scores[block])
            expected = always | set(others[: wanted - len(always)])
            found = {int(token) // 16 for token in looks[0, head, position].nonzero() if token <= own * 16}
            assert found == expected


@pytest.mark.parametrize("method", NOTHING)
def test_counts_are_those_of_brute_force(method: KeyMethod, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "key_delta": np.linspace(0.0, 1.0, LAYERS).tolist(),
        "key_bits": [4.0] * LAYERS,
        "sink_window": [float(value) for value in range(3, 3 + LAYERS)],
        "key_blocks": np.linspace(0.2, 1.0, LAYERS).tolist(),
    }[method]
    asked, read = plan(method, *values, window=0.2), prompt_rows(PROMPT, LENGTH)
    passes: list[tuple[int, Tensor, Tensor]] = []
    original = keys._scores
    monkeypatch.setattr(keys, "_scores", lambda *given: passes.append(given[1:4]) or original(*given))
    engine = key_engine()
    with torch.inference_mode(), apply_key_plan(engine.torch_model, asked, read) as counts:
        engine.torch_model(input_ids=tokens(), use_cache=False)
    monkeypatch.undo()
    ids = tokens().numpy().astype(np.int32)
    data = TokenSet(ids, ~read.numpy(), np.zeros(2, np.int64), ("texts",), read.numpy())
    stages: tuple[tuple[Stage, Tensor], ...] = (("reading", read), ("decoding", ~read))
    for stage, rows in stages:
        for row in range(2):
            computed = everything = 0
            for layer, query, key in passes:
                value, dim = values[layer], key.shape[3]
                moved = kept_keys(key, value)[1] if method == "key_delta" else None
                looks = chosen_blocks(query, key, value) if method == "key_blocks" else None
                square = max(1, int(0.2 * int(read[row].sum())))
                for position in rows[row].nonzero().flatten().tolist():
                    for head in range(key.shape[1]):
                        for other in range(position + 1):
                            everything += dim
                            cost = dim
                            if moved is not None and value:
                                near = position // square == other // square
                                near = near if read[row, position] else position - other < 4
                                cost = dim if near else int(moved[row, head, other].sum())
                            elif method == "sink_window":
                                cost = dim * (other < 4 or position - other < value)
                            elif looks is not None:
                                cost = dim * bool(looks[row, head, position, other])
                            computed += cost
            assert int(sum(counts)[row, rows[row]].sum()) == computed
            assert engine.work(asked, row, data, stage) == (computed, everything)


def test_an_engine_evaluates_plans_and_remembers_their_cost(tmp_path: Any) -> None:
    engine = key_engine()
    ids = np.random.default_rng(0).integers(3, VOCAB, (3, 40)).astype(np.int32)
    scored = np.broadcast_to(np.arange(40) >= 30, ids.shape).copy()
    prompt = np.stack([~scored[0], np.zeros(40, bool), ~scored[0]])  # the second is a text without a reply
    data = TokenSet(ids, scored, np.zeros(3, np.int64), ("texts",), prompt)
    nothing, some = plan("key_delta", 0.0), plan("key_delta", 0.7)
    [first] = engine.evaluate([nothing], data, "kl")
    [second, _] = engine.evaluate([some, engine.model.native], data, "kl", rows=[2, 0])
    assert max(map(abs, first.losses)) < 1e-9 and second.rows == (2, 0) and min(second.losses) > 1e-6
    [own] = engine.evaluate([engine.model.native], data, "nll")
    [same] = engine.evaluate([nothing], data, "nll")
    assert same.losses == own.losses and same.correct == own.correct
    read = [engine.work(some, row, data, "reading") for row in range(3)]
    written = [engine.work(some, row, data, "decoding") for row in range(3)]
    assert read[1][1] > read[0][1] and written[1] == (0, 0) and all(0 < own < all_ for own, all_ in read)
    with Journal(tmp_path, {}, {}) as journal:
        journal.add_evaluation("texts", second)
    with Journal(tmp_path, {}, {}, parse=KeyEngine.parse) as journal:
        assert journal.evaluation("texts", some).losses == second.losses  # type: ignore[union-attr]


def test_keys_of_plans_are_read_back() -> None:
    plans = [
        plan("key_delta", 0.1, 0.2, 0.30000000000000004, 0.0, 1e-7, 5.0, window=1 / 3, max_window=77, recent=2),
        plan("key_bits", 4),
        plan("sink_window", 112.0),
        plan("key_blocks", 0.4),
    ]
    for asked in plans:
        assert KeyEngine.parse(asked.key) == asked
    for text in (
        "key_delta",
        "key_delta|0.05,,4|",
        "key_delta|0.05,,4|nan",
        "key_bits|0.05,,4|4.5",
        "key_delta|2,,4|1.0",
        "key_delta|0.05,,4|01.0",
        "key_delta|0.05,0,4|1.0",
        "key_delta|0.05,,0|1.0",
        "key_other|0.05,,4|1.0",
    ):
        with pytest.raises(PatternError):
            KeyEngine.parse(text)


def test_what_does_not_fit_is_refused() -> None:
    model, one = dense_model(), plan("key_delta", 1.0)
    for other, asked, words in (
        (model, plan("key_delta", 1.0, 2.0), "values for 2 layers, the model has 6"),
        (dense_model("mistral", sliding_window=16), one, "sliding_window is 16"),
    ):
        with pytest.raises(SearchError, match=words), apply_key_plan(other, asked):
            pass
    with apply_key_plan(model, one), pytest.raises(RuntimeError, match="already applied"), apply_key_plan(model, one):
        pass
    with pytest.raises(SearchError, match="no cache for key_bits"):
        KeyDeltaCache(plan("key_bits", 4))
    asked = plan("key_delta", 1.0)
    cache = KeyDeltaCache(asked)
    with torch.inference_mode(), apply_key_plan(model, asked, cache=cache):
        model(input_ids=tokens()[:, :10], past_key_values=cache, use_cache=True)
        with pytest.raises(SearchError, match="read in one piece"):
            model(input_ids=tokens()[:, 10:20], past_key_values=cache, use_cache=True)
    for changes, words in (({"method": "other"}, "method is 'other'"), ({"values": (-1.0,)}, "a value is -1.0"),
                           ({"values": ()}, "a value is missing"), ({"window": 0.0}, "window is 0.0")):  # fmt: skip
        with pytest.raises(SearchError, match=words):
            KeyPlan(**{"method": "key_delta", "values": (1.0,), **changes})  # type: ignore[arg-type]


def test_layers_below_the_first_change_need_not_run() -> None:
    """Bit for bit the same, and the same counts."""
    ids = np.random.default_rng(0).integers(3, VOCAB, (2, 40)).astype(np.int32)
    data = TokenSet(ids, np.broadcast_to(np.arange(40) >= 10, ids.shape).copy(), np.zeros(2, np.int64), ("texts",))
    asked = [plan("key_delta", *[0.0] * layer, 0.5, *[0.9] * (LAYERS - layer - 1)) for layer in (0, 3, LAYERS - 1)]
    with_cache, without = (key_engine(prefix_cache_gb=gb) for gb in (1.0, 0.0))
    first = [list(engine.evaluate(asked, data, "kl")) for engine in (with_cache, without)]
    assert [item.losses for item in first[0]] == [item.losses for item in first[1]]
    assert len(with_cache._unchanged) == 2 and not without._unchanged
    for each in asked:
        for row in range(2):
            counts = {engine.work(each, row, data, "reading") for engine in (with_cache, without)}
            assert len(counts) == 1
