"""Decoding with the cache in host memory: the same as with all of it on the device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from indexcache_search.errors import SearchError
from indexcache_search.hf.pages import apply_page_roles
from indexcache_search.lab.offload import decoder as offloaded
from indexcache_search.lab.offload.decoder import OffloadedDecoder
from sglang_indexcache import Pattern
from sglang_indexcache.errors import PatternError
from sglang_indexcache.lru_buffer import LruBuffer
from sglang_indexcache.pattern.reuse import ReusePolicy
from sglang_indexcache.pattern.selection import Selection
from tests.search.test_pages import dense_model

PLAN = Selection(page_tokens=16, pages=5, recent_pages=2, sink_pages=1, score="compressed_keys", buffer_pages=7)
LENGTHS, STEPS = (97, 128, 150), 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def decoder_of(pattern: Pattern, requests: int) -> tuple[Any, OffloadedDecoder]:
    """A model, and its decoder; on a CUDA device with graphs."""
    model = dense_model().to(DEVICE)
    return model, OffloadedDecoder(model, pattern, requests, 224, graph=DEVICE == "cuda")


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (length + STEPS,), generator=generator).to(DEVICE) for length in LENGTHS]


@torch.inference_mode()
def expected(model: Any, pattern: Pattern, ids: Tensor, prompt: int, seen: dict[int, Tensor]) -> Tensor:
    """Logits of the reference engine in one pass, behind a prompt that is read densely."""
    read = (torch.arange(len(ids), device=DEVICE) < prompt)[None]
    with apply_page_roles(model, pattern, prompt=read, observe=seen.__setitem__):
        found: Tensor = model(ids[None]).logits[0]
    return found


@pytest.mark.parametrize(("steps", "buffer"), [("none", 5), ("ema:0.7", 7), ("none", 30)])
@pytest.mark.parametrize("roles", ["FFFFFF", "FSSDSF", "DFSSDD"])
def test_it_decodes_what_the_reference_computes(roles: str, steps: str, buffer: int) -> None:
    """Requests of three lengths, over the ends of several blocks; it brings what the simulator counts, exactly."""
    selection = replace(PLAN, steps=ReusePolicy.parse(steps), buffer_pages=buffer)
    pattern = Pattern(roles, selection)
    model, decoder = decoder_of(pattern, len(LENGTHS))
    ids = sequences()
    prompts = [item[:length] for item, length in zip(ids, LENGTHS, strict=True)]
    found = [torch.stack([decoder.read(request, prompt) for request, prompt in enumerate(prompts)])]
    for step in range(STEPS - 1):
        found.append(
            decoder.step(torch.stack([item[len(prompt) + step] for item, prompt in zip(ids, prompts, strict=True)]))
        )
    counted = dict.fromkeys(decoder.misses, 0)
    for request, (item, prompt) in enumerate(zip(ids, prompts, strict=True)):
        seen: dict[int, Tensor] = {}
        truth = expected(model, pattern, item, len(prompt), seen)
        mine = torch.stack([logits[request] for logits in found])
        torch.testing.assert_close(mine, truth[len(prompt) - 1 : -1], rtol=1e-3, atol=1e-3)
        for layer in counted:
            chosen = {at: seen[layer][0, at, : at // 16].nonzero()[:, 0] for at in range(len(prompt), len(item) - 1)}
            counted[layer] += brought(chosen, buffer)
    assert decoder.misses == counted
    assert (sum(counted.values()) > 0) == (buffer < 30)


def brought(chosen: dict[int, Tensor], size: int) -> int:
    """By position the blocks beside the one that is written; what the token before filled begins on the device."""
    first = min(chosen) - 1  # the prompt's last token, whose block is the one that is written
    buffer, misses = LruBuffer(size, range(max(0, first // 16 - size), first // 16)), 0
    for at, blocks in chosen.items():
        misses += len(buffer.use(blocks.int().cpu().numpy(), at // 16 - 1 if at % 16 == 0 else -1))
    return misses


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
        ({"steps": ReusePolicy.parse("bounded:1")}, "steps are bounded:1, expected one of none, ema"),
    ],
)
def test_plans_that_are_not_decoded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        OffloadedDecoder(dense_model(), Pattern("FFFFFF", replace(PLAN, **changes)), 1, 224)


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = dense_model(), sequences()[0].cpu()
    with pytest.raises(SearchError, match="the model is on device cpu, expected a CUDA device for a graph"):
        OffloadedDecoder(model, Pattern("FFFFFF", PLAN), 1, 224, graph=True)
    with pytest.raises(PatternError, match="pattern has 3 letters, model has 6 layers"):
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
