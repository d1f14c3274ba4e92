"""Choices that remember the steps before: against a plain walk, step by step, and the bounds that policies promise."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from extras.dense.tests.test_pages import KINDS, dense_model, logits
from indexcache_dense.hf.page_selector import (
    PageSelector,
    compressed_scores,
    importance,
    rounded_scores,
    token_max_scores,
    value_norm,
)
from indexcache_dense.hf.pages import apply_page_roles, attention_in_blocks
from indexcache_dense.reuse import ReusePolicy
from indexcache_dense.selection import Selection
from sglang_indexcache import Pattern

LENGTH, PROMPT = 200, 90
FEW = Selection(page_tokens=4, pages=7, recent_pages=2, sink_pages=1, score="token_max")
KEYS = Selection(page_tokens=32, pages=4, recent_pages=2, sink_pages=0, score="compressed_keys")
POLICIES = ("none", "ema:0.9", "bounded:1", "bounded:2", "refresh:5", "nosa:1")


def tokens(rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(3, 96, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def prompt_rows(rows: int = 2) -> Tensor:
    return (torch.arange(LENGTH) < PROMPT).expand(rows, LENGTH)


class Walk:
    """One sequence, step after step, in plain words."""

    def __init__(self, selection: Selection, importance: NDArray[np.float32]) -> None:
        self.selection, self.importance = selection, importance
        self.steps, self.average, self.chosen, self.best = 0, np.zeros(0), set[int](), set[int]()

    def step(self, scores: NDArray[np.float32], position: int, prompt: bool) -> set[int]:
        selection = self.selection
        live = position // selection.page_tokens + 1
        if prompt or live <= selection.pages:
            self.steps = 0
            return set(range(live))
        open_ = list(range(selection.sink_pages, live - selection.recent_pages))
        always = set(range(live)) - set(open_)
        wanted = selection.pages - len(always)

        def top(values: NDArray[np.float32], among: list[int], count: int) -> set[int]:
            return set(sorted(among, key=lambda page: (-float(values[page]), page))[:count])

        policy, fresh = selection.steps, self.steps == 0
        own = top(scores, open_, wanted)
        if policy.policy == "ema":
            before = np.zeros(live, np.float32)
            before[: len(self.average)] = self.average if not fresh else 0
            beta = policy.beta or 0.0
            self.average = scores[:live] if fresh else (beta * before + (1 - beta) * scores[:live]).astype(np.float32)
            best = top(self.average, open_, wanted)
        elif policy.policy == "nosa":
            asked = top(scores, open_, policy.query_pages or 0)
            best = asked | top(self.importance, [page for page in open_ if page not in asked], wanted - len(asked))
        elif policy.policy == "refresh":
            best = own if fresh or self.steps % (policy.every or 1) == 0 else self.best & set(open_)
        elif policy.policy == "bounded" and not fresh:
            best = top(scores, [page for page in open_ if page in self.chosen], wanted)
            for _ in range(policy.swaps or 0):
                worst = min(best, key=lambda page: (float(scores[page]), page))
                outside = [page for page in open_ if page not in best]
                if not outside:
                    break
                first = min(outside, key=lambda page: (-float(scores[page]), page))
                if scores[first] <= scores[worst]:
                    break
                best = best - {worst} | {first}
        else:
            best = own
        self.best, self.chosen, self.steps = best, best | always, self.steps + 1
        return self.chosen


@pytest.mark.parametrize("steps", POLICIES)
@pytest.mark.parametrize("turns", ["none", "prompt", "two prompts"])
def test_choices_are_those_of_a_plain_walk(steps: str, turns: str) -> None:
    """Two sequences of scores that drift, at once and in parts; a prompt ends what is remembered."""
    selection = replace(FEW, page_tokens=32, steps=ReusePolicy.parse(steps))
    rng, length = np.random.default_rng(0), 700
    pages = -(-length // 32)
    noise = rng.random((2, length, pages), np.float32)
    scores = np.float32(0.9) * rng.random((2, 1, pages), np.float32) + np.float32(0.3) * noise
    settled, position = rng.random((2, pages), np.float32), np.arange(length)
    prompt = {"prompt": position < 400, "two prompts": (position < 300) | (position // 50 == 9)}.get(turns)
    given = None if prompt is None else torch.from_numpy(np.stack([prompt, np.zeros(length, bool)]))
    found, parted = PageSelector(selection), PageSelector(selection)
    whole = found.choose(torch.from_numpy(scores), 0, given, torch.from_numpy(settled))
    parts = []
    for first, end in ((0, 290), (290, 291), (291, 480), (480, length)):
        live = -(-end // 32)
        part = None if given is None else given[:, first:end]
        chosen = parted.choose(
            torch.from_numpy(scores[:, first:end, :live]), first, part, torch.from_numpy(settled[:, :live])
        )
        parts.append(torch.nn.functional.pad(chosen, (0, pages - live)))
    for row in range(2):
        walk = Walk(selection, settled[row])
        for at in range(length):
            expected = walk.step(scores[row, at], at, prompt is not None and row == 0 and bool(prompt[at]))
            seen = set(whole[row, at].nonzero()[:, 0].tolist())
            assert {page for page in seen if page <= at // 32} == expected, (row, at)
            assert torch.equal(whole[row, at, : at // 32 + 1], torch.cat(parts, 1)[row, at, : at // 32 + 1])


def test_what_policies_promise() -> None:
    """Theorem 2 of NOSA, and the bound of `bounded`; both are reached, so that neither is empty."""
    rng, moved = np.random.default_rng(1), {"nosa": 0, "bounded": 0}
    for _ in range(200):
        pages, number = int(rng.integers(20, 60)), int(rng.integers(1, 8))
        wanted = int(rng.integers(number, 12))
        selection = Selection(page_tokens=32, pages=wanted + 3, recent_pages=2, sink_pages=1, score="compressed_keys")
        scores = torch.from_numpy(rng.random((1, 30, pages), np.float32))
        settled = torch.from_numpy(rng.random((1, pages), np.float32))
        for policy in moved:
            steps = ReusePolicy.parse(f"{policy}:{number}")
            chooser = PageSelector(replace(selection, steps=steps))
            kept = chooser.choose(scores, pages * 32 - 31, None, settled)[0]  # all in the last page
            assert bool((kept.sum(1) == wanted + 3).all())
            new = (kept[1:] & ~kept[:-1]).sum(1)
            assert int(new.max()) <= number, policy
            moved[policy] += int((new == number).sum())
    assert min(moved.values()) > 1000


def test_theorem_2_holds_for_each_key_head() -> None:
    """Of k pages at least k - `query_pages` stay from one step to the next, in every key head of a model, and tightly.

    With one choice for all heads the same holds; a key head chooses other pages than the others.
    """
    selection = replace(KEYS, pages=5, steps=ReusePolicy.parse("nosa:1"), heads="key")
    model, seen, new = dense_model(), dict[int, Tensor](), 0
    with apply_page_roles(model, Pattern("FFFFFF", selection), prompt_rows(), seen.__setitem__):
        logits(model, input_ids=tokens())
    differ = 0
    for kept in seen.values():
        assert kept.shape == (2 * 2, LENGTH, -(-LENGTH // 32))
        differ += int((kept[::2] != kept[1::2]).any(-1).sum())
        for row in kept:
            for at in range(160, LENGTH - 1):  # five pages, from there on
                before, after = row[at, : at // 32 + 1], row[at + 1, : at // 32 + 1]
                assert int(row[at + 1, : (at + 1) // 32 + 1].sum()) == 5
                if (at + 1) // 32 == at // 32:  # the paper leaves the page of the new token out
                    assert int((before & after).sum()) >= 5 - 1
                    new += int((after & ~before).sum())
    assert new > 20 and differ > 100


@pytest.mark.parametrize("steps", POLICIES)
@pytest.mark.parametrize("score", ["token_max", "compressed_keys"])
def test_with_one_key_head_joint_and_key_are_the_same(steps: str, score: str) -> None:
    model, found = dense_model(num_key_value_heads=1), []
    for heads in ("joint", "key"):
        selection = replace(KEYS, score=score, heads=heads, steps=ReusePolicy.parse(steps))  # type: ignore[arg-type]
        seen: dict[int, Tensor] = {}
        with apply_page_roles(model, Pattern("DSFSFF", selection), prompt_rows(), seen.__setitem__):
            found.append((logits(model, input_ids=tokens()), *seen.values()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("score", ["token_max", "compressed_keys"])
def test_a_key_head_chooses_as_if_it_were_alone(score: str) -> None:
    """What one key head selects does not change with what the other sees."""
    selection = replace(KEYS, score=score, heads="key")  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    query, key = torch.randn(2, 4, 30, 8, generator=generator), torch.randn(2, 2, LENGTH, 8, generator=generator)
    weights = (query @ key.repeat_interleave(2, 1).mT).softmax(-1)

    def scores(query: Tensor, key: Tensor, weights: Tensor, selection: Selection) -> Tensor:
        if score == "token_max":
            return token_max_scores(weights, selection, key.shape[1])
        return compressed_scores(query, key, 0.5, selection)

    both = scores(query, key, weights, selection)
    assert both.shape == (4, 30, -(-LENGTH // 32))
    for head in range(2):
        own = slice(2 * head, 2 * head + 2)
        alone = scores(query[:, own], key[:, [head]], weights[:, own], replace(selection, heads="joint"))
        torch.testing.assert_close(both[head::2], alone)
        norms = value_norm(key, selection)[head::2]
        torch.testing.assert_close(norms, key[:, head].norm(dim=-1))


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_scores_of_compressed_keys_are_the_definition(page_tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    selection = replace(KEYS, page_tokens=page_tokens)
    query, key = torch.randn(2, 4, 30, 8, generator=generator), torch.randn(2, 2, LENGTH, 8, generator=generator)
    found = compressed_scores(query, key, 0.5, selection)
    pages = -(-LENGTH // page_tokens)
    assert found.shape == (2, 30, pages)
    for row in range(2):
        for at in range(30):
            position, expected = LENGTH - 30 + at, torch.zeros(pages)
            begins = [begin for begin in range(0, position - 30, 16) if begin + 31 <= position]
            for group in range(2):
                means = torch.stack([key[row, group, begin : begin + 32].mean(0) for begin in begins])
                shares = torch.zeros(len(begins))
                for head in (2 * group, 2 * group + 1):
                    shares += (means @ query[row, head, at] * 0.5).softmax(0)
                for page in range(pages):
                    touching = [
                        float(share)
                        for begin, share in zip(begins, shares, strict=True)
                        if begin < (page + 1) * page_tokens and begin + 32 > page * page_tokens
                    ]
                    expected[page] += max(touching, default=0.0)
            torch.testing.assert_close(found[row, at], expected, rtol=1e-5, atol=1e-6)
    short = compressed_scores(query[:, :, :5], key[:, :, :20], 0.5, selection)
    assert short.shape[:2] == (2, 5) and not short.any()


@pytest.mark.parametrize("page_tokens", [4, 64])
@pytest.mark.parametrize("heads", ["joint", "key"])
def test_scores_of_rounded_keys_are_the_definition(page_tokens: int, heads: Any) -> None:
    """Levels are counted with exact fractions of a key's range; ends of the range are kept in float16."""
    generator = torch.Generator().manual_seed(2)
    selection = replace(KEYS, page_tokens=page_tokens, score="rounded_keys", heads=heads)
    query, key = torch.randn(2, 4, 30, 8, generator=generator), torch.randn(2, 2, LENGTH, 8, generator=generator)
    low = key.amin(-1, keepdim=True).half().double()
    step = ((key.amax(-1, keepdim=True) - low.float()) / 15).half().double()
    rounded = low + step * ((key.double() - low) / step).round().clamp(0, 15)
    found, pages = rounded_scores(query, key, 0.5, selection), -(-LENGTH // page_tokens)
    expected = torch.zeros(2, 2, 30, pages, dtype=torch.float64)  # by key head
    for row, at, head in np.ndindex(2, 30, 4):
        seen = rounded[row, head // 2, : LENGTH - 30 + at + 1]
        shares = (seen @ query[row, head, at].double() * 0.5).softmax(0)
        for page, part in enumerate(shares.split(page_tokens)):
            expected[row, head // 2, at, page] = max(float(expected[row, head // 2, at, page]), float(part.sum()))
    expected = expected.sum(1) if heads == "joint" else expected.flatten(0, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_importance_is_of_whole_pages() -> None:
    value = torch.randn(1, 2, 150, 8, generator=torch.Generator().manual_seed(4))
    norm = value.transpose(1, 2).flatten(2).norm(dim=-1)[0]
    found = importance(value_norm(value, KEYS), replace(KEYS, page_tokens=64))[0]
    expected = [max(float(norm[page * 64 + at : page * 64 + at + 32].mean()) for at in (0, 16, 32)) for page in (0, 1)]
    torch.testing.assert_close(found, torch.tensor([*expected, 0.0]))


@pytest.mark.parametrize(
    "kind", [kind if kind in ("llama", "qwen3") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
@pytest.mark.parametrize(
    ("score", "heads"),
    [("token_max", "joint"), ("compressed_keys", "joint"), ("compressed_keys", "key"), ("rounded_keys", "joint")],
)
def test_all_pages_are_attention_to_everything(kind: str, score: str, heads: str) -> None:
    model = dense_model(kind)
    all_pages = replace(KEYS, pages=LENGTH, score=score, heads=heads)  # type: ignore[arg-type]
    untouched = logits(model, input_ids=tokens())
    for roles in ("FFFFFF", "FSSDFS"):
        with apply_page_roles(model, Pattern(roles, all_pages)):
            assert torch.equal(logits(model, input_ids=tokens()), untouched)
        with (
            attention_in_blocks(),
            apply_page_roles(model, Pattern(roles, all_pages)),
        ):  # 1.8e-4 from float64, as without
            torch.testing.assert_close(logits(model, input_ids=tokens()), untouched, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("steps", POLICIES)
@pytest.mark.parametrize("score", ["token_max", "compressed_keys", "rounded_keys"])
@pytest.mark.parametrize(
    ("heads", "step"),
    [
        ("joint", LENGTH - PROMPT),
        ("key", 7),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("joint", 7), ("joint", 1), ("key", 1), ("key", LENGTH - PROMPT))
        ),
    ],
)
def test_one_pass_is_decoding_step_by_step(steps: str, score: str, step: int, heads: str) -> None:
    """Behind a prompt that was read densely; in blocks, too."""
    wanted, policy = 5 if steps == "bounded:2" else 4, ReusePolicy.parse(steps)
    selection = replace(KEYS, pages=wanted, score=score, heads=heads, steps=policy)  # type: ignore[arg-type]
    seed = 1 if heads == "joint" else 2  # with 1 two scores of one key head differ by less than rounding
    model, ids, pattern = dense_model(), tokens(seed=seed), Pattern("DSFSFF", selection)
    whole: dict[int, Tensor] = {}
    with apply_page_roles(model, pattern, prompt=prompt_rows(), observe=whole.__setitem__):
        expected = logits(model, input_ids=ids)
    assert (logits(model, input_ids=ids) - expected)[:, PROMPT:].abs().max() > 0.1
    for around in (nullcontext(), attention_in_blocks()):
        cache, found = DynamicCache(config=model.config), []
        parts: dict[int, list[Tensor]] = {layer: [] for layer in range(6)}

        def observe(layer: int, kept: Tensor, parts: dict[int, list[Tensor]] = parts) -> None:
            parts[layer] += kept.unbind(1)

        with torch.inference_mode():
            model(input_ids=ids[:, :PROMPT], past_key_values=cache)
        with around, torch.inference_mode(), apply_page_roles(model, pattern, observe=observe):
            for start in range(PROMPT, LENGTH, step):
                found.append(model(input_ids=ids[:, start : start + step], past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(found, 1), expected[:, PROMPT:], rtol=1e-3, atol=1e-3)
        for layer, kept in parts.items():
            for at, row in enumerate(kept):
                live = (PROMPT + at) // 32 + 1
                assert torch.equal(row[:, :live], whole[layer][:, PROMPT + at, :live]), (layer, at)


# -- the plan


def test_scores_by_tokens_do_not_see_what_lies_behind() -> None:
    """In one pass pages behind a query have score 0; an average must not see them either."""
    weights = torch.ones(1, 1, LENGTH, LENGTH).tril() / torch.arange(1, LENGTH + 1)[:, None]
    chooser = PageSelector(replace(FEW, steps=ReusePolicy.parse("ema:0.5")))
    kept = chooser.choose(token_max_scores(weights, FEW, 1), 0)
    assert int(kept[0, -1].sum()) == FEW.pages
