"""Decoding over chosen blocks: everything with share 1, else what the definition attends to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache
from typer.testing import CliRunner

from extras.dense.tests.test_pages import KINDS, dense_model
from indexcache_lab.cli import app
from indexcache_lab.edge import decoding as block_decoding
from indexcache_lab.edge.decoding import Blocks
from indexcache_lab.edge.decoding import apply_block_decoding as applied
from indexcache_search.errors import SearchError
from tests.conftest import LAYERS, VOCAB

PROMPT, LENGTH = 50, 75


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def decoded(model: Any, blocks: Blocks | None, backend: Any = "naive") -> Tensor:
    """Logits of each token behind the prompt, decoded one by one."""
    cache, ids = StaticCache(config=model.config, max_cache_len=LENGTH + 5), tokens()
    logits = []

    def run(piece: Tensor) -> None:
        logits.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits[:, -1])

    pieces = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, 1)]
    if blocks is None:
        for piece in pieces:
            run(piece)
    else:
        with applied(model, blocks, cache, backend):
            for piece in pieces:
                run(piece)
    return torch.stack(logits[1:], 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("roles", [pytest.param("FFFFFF", marks=pytest.mark.slow), "FSSDSS", "DDFSFS"])
def test_share_1_is_attention_to_everything(kind: str, roles: str) -> None:
    model = dense_model(kind)
    model.set_attn_implementation("sdpa")
    expected = decoded(model, None)
    torch.testing.assert_close(decoded(model, Blocks(roles=roles, share=1.0, tokens=4)), expected, atol=1e-4, rtol=1e-4)
    few = decoded(model, Blocks(roles=roles, share=0.3, tokens=4))
    assert (few - expected).abs().max() > 1e-3
    assert torch.equal(decoded(model, None), expected)  # undone


def test_blocks_are_the_best_by_their_mean_key_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Tensor, Tensor, Tensor, int]] = []
    original = block_decoding.block_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, **given: Any) -> Tensor:
        calls.append((q.clone(), k.clone(), chosen.clone(), int(given["lengths"][0])))
        return original(q, k, v, chosen, **given)

    monkeypatch.setattr(block_decoding, "block_attention", watched)
    blocks = Blocks(roles="FSFSSD", share=0.4, tokens=4)
    decoded(dense_model(), blocks)
    steps = LENGTH - PROMPT
    assert len(calls) == steps * (LAYERS - 1)
    for step in range(steps):
        own = calls[step * 5 : step * 5 + 5]
        for place, source in enumerate((0, 0, 2, 2, 2)):
            assert torch.equal(own[place][2], own[source][2])
        for place in (0, 2):
            q, k, chosen, length = own[place]
            assert length == PROMPT + step + 1
            number = -(-length // 4)
            for row in range(2):
                scores = {}
                for block in range(number):
                    mean = k[row, :, block * 4 : min(block * 4 + 4, length)].sum(1) / 4  # [G, D]
                    scores[block] = float((q[row].view(2, -1, q.shape[2]).sum(1) * mean).sum())
                always = {0, number - 2, number - 1}
                others = sorted(set(scores) - always, key=lambda block: -scores[block])
                assert set(chosen[row].tolist()) == always | set(others[: blocks.count(number) - 3])


def test_what_does_not_fit_is_refused() -> None:
    model = dense_model()
    cache = StaticCache(config=model.config, max_cache_len=8)
    for roles in ("", "S", "DSF", "FX"):
        with pytest.raises(SearchError, match="an F before the first S"):
            Blocks(roles=roles, share=0.5)
    for changes in ({"share": 0.0}, {"share": 1.1}, {"tokens": 0}):
        with pytest.raises(SearchError, match="can't be chosen"):
            Blocks(**{"roles": "F", "share": 0.5, **changes})  # type: ignore[arg-type]
    some, two = Blocks(roles="F" * LAYERS, share=0.5), Blocks(roles="FS", share=0.5)
    with pytest.raises(SearchError, match="there are 2 roles, the model has 6 layers"), applied(model, two, cache):
        pass
    with applied(model, some, cache), pytest.raises(RuntimeError, match="already applied"), applied(model, some, cache):
        pass


def test_the_command_times_steps(dense_folder: Path, model_folder: Path) -> None:
    threads = str(torch.get_num_threads())
    words = ["edge", "--model", str(dense_folder), "--contexts", "64,100", "--threads", threads]
    done = CliRunner().invoke(app, [*words, "--share", "0.5,1", "--every", "3"])
    assert done.exit_code == 0, done.output
    for word in ("everything", "0.5 of the blocks", "1 of the blocks", "64", "100"):
        assert word in done.stdout
    for more, line in (
        (("--contexts", "many"), "--contexts and --share are numbers"),
        (("--contexts", "0"), "--contexts is 0, expected 1 to"),
        (("--share", "2"), "expected a share up to 1"),
        (("--model", str(model_folder)), "has indexers that choose, expected a dense model"),
    ):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 2 and line in " ".join(done.stderr.split()), done.output
