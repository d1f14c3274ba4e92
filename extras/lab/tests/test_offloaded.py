"""Decoding with the cache in host memory: the same as with all of it on the device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from extras.dense.tests.test_pages import dense_model
from extras.lab.tests.evicting import heads_for
from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.reuse import NO_MEMORY, ReusePolicy
from indexcache_dense.selection import Heads, Selection
from indexcache_lab.eviction.heads import BiasUse, attach
from indexcache_lab.kernels import BlockBuffer, swap_blocks
from indexcache_lab.offload import decoder as offloaded
from indexcache_lab.offload.decoder import OffloadedDecoder, Prefill
from indexcache_lab.offload.lru_buffer import LruBuffer
from indexcache_search.errors import SearchError
from sglang_indexcache import Pattern
from sglang_indexcache.io.errors import PatternError
from sglang_indexcache.io.messages import OTHER_LENGTH

PLAN = Selection(page_tokens=16, pages=5, recent_pages=2, sink_pages=1, score="compressed_keys", buffer_pages=7)
LARGE_PAGES = replace(PLAN, page_tokens=32, pages=4, sink_pages=0, buffer_pages=5)
LENGTHS, STEPS = (97, 128, 150), 40
LONGER = (150, 160, 190)  # than four pages of 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def decoder_of(pattern: Pattern, requests: int, prefill: Prefill = "dense") -> tuple[Any, OffloadedDecoder]:
    """A model, and its decoder; on a CUDA device with graphs."""
    model = dense_model().to(DEVICE)
    assert pattern.selection is not None
    if pattern.selection.steps.importance:
        attach(model, heads_for(model))
    return model, OffloadedDecoder(model, pattern, requests, 256, prefill=prefill, graph=DEVICE == "cuda")


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length + STEPS,), generator=generator).to(DEVICE) for length in lengths]


@torch.inference_mode()
def expected(
    model: Any, pattern: Pattern, ids: Tensor, prompt: int, seen: dict[int, Tensor], prefill: Prefill = "dense"
) -> Tensor:
    """Logits of the reference engine, behind a prompt that is read densely or by pages that its tokens select.

    A prompt remembers nothing, so that a sparse one is a pass of its own.
    """
    if prefill == "dense":
        read = (torch.arange(len(ids), device=DEVICE) < prompt)[None]
        with apply_page_roles(model, pattern, prompt=read, observe=seen.__setitem__):
            found: Tensor = model(ids[None]).logits[0]
        return found
    assert pattern.selection is not None
    nosa = pattern.selection.steps.policy == "nosa"
    forgetful = pattern if nosa else replace(pattern, selection=replace(pattern.selection, steps=NO_MEMORY))
    cache, behind = DynamicCache(config=model.config), dict[int, Tensor]()
    with apply_page_roles(model, forgetful):
        begins = model(ids[None, :prompt], past_key_values=cache).logits[0]
    with apply_page_roles(model, pattern, observe=behind.__setitem__):
        ends = model(ids[None, prompt:], past_key_values=cache).logits[0]
    seen.update({layer: F.pad(kept, (0, 0, prompt, 0)) for layer, kept in behind.items()})
    return torch.cat([begins, ends])


CASES = [
    *(("none", 5, "joint"), ("ema:0.7", 7, "joint"), ("none", 30, "joint"), ("none", 6, "key"), ("ema:0.7", 7, "key")),
    *(("bounded:1", 6, "joint"), ("bounded:1", 6, "key"), ("refresh:6", 7, "joint"), ("refresh:6", 7, "key")),
    *(("nosa:1", 5, "joint"), ("nosa:1", 4, "key"), ("nosa:1:heads", 5, "joint"), ("nosa:1:heads", 5, "key")),
]


@pytest.mark.parametrize(
    ("steps", "buffer", "heads", "prefill"),
    [
        *((*case, "dense") for case in CASES),
        *((*case, "sparse") for case in CASES if case[0] in ("bounded:1", "nosa:1:heads") and case[2] == "key"),
    ],
)
@pytest.mark.parametrize(
    "roles", ["FSSDSF", *(pytest.param(roles, marks=pytest.mark.slow) for roles in ("DFSSDD", "FFFFFF"))]
)
def test_it_decodes_what_the_reference_computes(
    roles: str, steps: str, buffer: int, heads: Heads, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of three lengths, over the ends of several blocks; it brings what simulator and kernel count."""
    monkeypatch.setattr(offloaded, "ROWS", 64)  # prompts are read in parts
    plan, lengths = (LARGE_PAGES, LONGER) if steps.startswith("nosa") else (PLAN, LENGTHS)
    selection = replace(plan, steps=ReusePolicy.parse(steps), buffer_pages=buffer, heads=heads)
    pattern, size = Pattern(roles, selection), selection.page_tokens
    model, decoder = decoder_of(pattern, len(lengths), prefill)
    ids = sequences(lengths)
    prompts = [item[:length] for item, length in zip(ids, lengths, strict=True)]
    found = [torch.stack([decoder.read(request, prompt) for request, prompt in enumerate(prompts)])]
    for step in range(STEPS - 1):
        found.append(
            decoder.step(torch.stack([item[len(prompt) + step] for item, prompt in zip(ids, prompts, strict=True)]))
        )
    simulated, by_kernel = (dict.fromkeys(decoder.misses, 0) for _ in range(2))
    for request, (item, prompt) in enumerate(zip(ids, prompts, strict=True)):
        seen: dict[int, Tensor] = {}
        truth = expected(model, pattern, item, len(prompt), seen, prefill)
        mine = torch.stack([logits[request] for logits in found])
        torch.testing.assert_close(mine, truth[len(prompt) - 1 : -1], rtol=1e-3, atol=1e-3)
        for layer in decoder.misses:
            assert len(seen[layer]) == (2 if heads == "key" else 1)  # key heads
            for row in seen[layer]:
                chosen = {at: row[at, : at // size].nonzero()[:, 0].int() for at in range(len(prompt), len(item) - 1)}
                simulated[layer] += brought(chosen, buffer, size)
                by_kernel[layer] += brought_by_kernel(chosen, buffer, size)
    assert decoder.misses == simulated == by_kernel
    assert (sum(simulated.values()) > 0) == (buffer < 30)


def filled_before(at: int, size: int) -> int:
    """The block that the token before `at` filled, which begins on the device; -1 for none."""
    return at // size - 1 if at % size == 0 else -1


def brought(chosen: dict[int, Tensor], slots: int, size: int) -> int:
    """By position the blocks beside the one that is written; what the token before filled begins on the device."""
    full = (min(chosen) - 1) // size  # the block of the prompt's last token is the one that is written
    buffer, misses = LruBuffer(slots, range(max(0, full - slots), full)), 0
    for at, blocks in chosen.items():
        misses += len(buffer.use(blocks.cpu().numpy(), filled_before(at, size)))
    return misses


def brought_by_kernel(chosen: dict[int, Tensor], slots: int, size: int) -> int:
    """The same by `swap_blocks`."""
    full, buffer, misses = (min(chosen) - 1) // size, BlockBuffer.empty(1, slots, DEVICE), 0
    held = torch.arange(max(0, full - slots), full, dtype=torch.int32, device=DEVICE)
    if len(held):
        swap_blocks(held[None], torch.tensor([-1], dtype=torch.int32, device=DEVICE), buffer)
    for at, blocks in chosen.items():
        new_block = torch.tensor([filled_before(at, size)], dtype=torch.int32, device=DEVICE)
        misses += int(swap_blocks(blocks[None], new_block, buffer)[1].sum())
    return misses


def test_heads_of_training_alone_choose_but_add_nothing() -> None:
    """S-DMA: the reference's logits again, which are not those with the bias; no bias is kept on the device."""
    selection = replace(LARGE_PAGES, steps=ReusePolicy.parse("nosa:1:heads"), heads="key")
    pattern, ids = Pattern("DFSFFF", selection), sequences(LONGER)[0]
    found = {}
    for use in get_args(BiasUse):
        model = dense_model().to(DEVICE)
        attach(model, heads_for(model, use))
        decoder = OffloadedDecoder(model, pattern, 1, 256, graph=DEVICE == "cuda")
        rows = [decoder.read(0, ids[:150]), *(decoder.step(token[None])[0] for token in ids[150:189])]
        found[use] = torch.stack(rows)
        truth = expected(model, pattern, ids, 150, {})
        torch.testing.assert_close(found[use], truth[149:189], rtol=1e-3, atol=1e-3)
        assert {layer.bias is None for layer in decoder._layers[1:]} == {use == "training"}
    assert not torch.allclose(found["always"], found["training"], atol=0.1)


def generate(decoder: OffloadedDecoder, prompts: list[Tensor], steps: int) -> list[Tensor]:
    """Greedy tokens of all requests, step by step."""
    tokens = [torch.stack([decoder.read(request, prompt) for request, prompt in enumerate(prompts)]).argmax(-1)]
    for _ in range(steps - 1):
        tokens.append(decoder.step(tokens[-1]).argmax(-1))
    return tokens


def test_generated_tokens_are_those_of_a_buffer_for_everything() -> None:
    prompts = [item[:length] for item, length in zip(sequences(), LENGTHS, strict=True)]
    replies = []
    for buffer in (5, 40):
        pattern = Pattern("FSSFSF", replace(PLAN, buffer_pages=buffer))
        replies.append(generate(decoder_of(pattern, 3)[1], prompts, 40))
    assert torch.equal(*(torch.stack(reply) for reply in replies)) and len(replies[0]) == 40


def test_a_request_may_be_read_anew() -> None:
    """Another prompt in its place, while the others go on."""
    ids, pattern = sequences(), Pattern("FSDFSF", replace(PLAN, steps=ReusePolicy.parse("ema:0.7")))
    model, decoder = decoder_of(pattern, 2)
    decoder.read(0, ids[0][:97])
    decoder.read(1, ids[1][:128])
    for step in range(20):
        decoder.step(torch.stack([ids[0][97 + step], ids[1][128 + step]]))
    decoder.read(0, ids[2][:150])
    found = [decoder.step(torch.stack([ids[2][150 + step], ids[1][148 + step]])) for step in range(20)]
    for request, (item, first) in enumerate(((ids[2], 150), (ids[1], 128))):
        truth = expected(model, pattern, item, first, {})
        begin = 150 if request == 0 else 148
        mine = torch.stack([logits[request] for logits in found])
        torch.testing.assert_close(mine, truth[begin : begin + 20], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer_pages": None}, "can't be offloaded, expected compressed_keys and buffer_pages"),
        ({"score": "token_max"}, "can't be offloaded"),
        (
            {"page_tokens": 32, "pages": 4, "sink_pages": 0, "steps": ReusePolicy.parse("nosa:1:heads")},
            "the plan asks for trained heads, and the model has none here",
        ),
    ],
)
def test_plans_that_are_not_decoded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        OffloadedDecoder(dense_model(), Pattern("FFFFFF", replace(PLAN, **changes)), 1, 224)


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = dense_model(), sequences()[0].cpu()
    with pytest.raises(SearchError, match="the model is on device cpu, expected a CUDA device for a graph"):
        OffloadedDecoder(model, Pattern("FFFFFF", PLAN), 1, 224, graph=True)
    with pytest.raises(SearchError, match="prefill is 'full', expected dense or sparse"):
        OffloadedDecoder(model, Pattern("FFFFFF", PLAN), 1, 224, prefill="full")  # type: ignore[arg-type]
    with pytest.raises(PatternError, match=OTHER_LENGTH.format(3, 6)):
        OffloadedDecoder(model, Pattern("FFF", PLAN), 1, 224)
    decoder = OffloadedDecoder(model, Pattern("FFFFFF", PLAN), 2, 112)
    with pytest.raises(SearchError, match="a prompt has 80 tokens, expected more than 80 and fewer than 112"):
        decoder.read(0, ids[:80])
    with pytest.raises(SearchError, match=r"requests have \[0, 0\] tokens, expected some"):
        decoder.step(ids[:2])
    decoder.read(0, ids[:111])
    decoder.read(1, ids[:90])
    decoder.step(ids[:2])
    with pytest.raises(SearchError, match=r"requests have \[112, 91\] tokens, expected some, and fewer than 112"):
        decoder.step(ids[:2])
    monkeypatch.setattr(offloaded.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(SearchError, match=r"takes 0\.0 GB of host memory, 0\.0 GB are free; expected fewer requests"):
        OffloadedDecoder(model, Pattern("FFFFFF", PLAN), 1, 224)
