"""The reference engine: transformers' blocks against their definition, patterns, and a search of a random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from extras.minimax.tests.models import BLOCK, LAYERS, SITES, TOKENS, TOPK, VOCAB, build
from indexcache_minimax.engine import BlockEngine
from indexcache_search.cli.search import app as search_app
from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern, PatternFile

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LENGTH = 48


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="module")
def engine(saved: Path) -> Any:
    return TransformersEngine.load(str(saved), device="cpu")


def tokens(seed: int = 1, rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(2, VOCAB, (rows, length)))


def data(rows: int = 2) -> TokenSet:
    ids = tokens(rows=rows).numpy().astype(np.int32)
    scored = np.zeros(ids.shape, dtype=bool)
    scored[:, TOKENS + 1 :] = True
    return TokenSet(ids, scored, np.zeros(rows, np.int64), ("random",))


def chosen_blocks(engine: Any, pattern: Pattern, ids: Tensor) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    with torch.inference_mode(), apply_roles(engine.torch_model, pattern, found.__setitem__):
        engine.torch_model(ids, use_cache=False)
    return found


def defined(indexer: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> list[list[set[int]]]:
    """Blocks for each index head and query: the own one, and those of the keys with the highest products."""

    def turned(x: Tensor) -> Tensor:
        width = cos.shape[-1]
        part, rest = x[..., :width], x[..., width:]
        first, second = part.chunk(2, -1)
        return torch.cat([part * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    def normed(x: Tensor, norm: Any) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + norm.weight)

    length = len(hidden)
    q = normed(indexer.q_proj(hidden).view(length, -1, indexer.head_dim), indexer.q_norm).transpose(0, 1)
    q, k = turned(q), turned(normed(indexer.k_proj(hidden), indexer.k_norm))
    found = []
    for head in q:
        rows = []
        for position, query in enumerate(head):
            products, own = k[: position + 1] @ query, position // BLOCK
            best = {block: products[block * BLOCK : (block + 1) * BLOCK].max().item() for block in range(own)}
            rows.append({own, *sorted(best, key=best.__getitem__)[:-TOPK:-1]})
        found.append(rows)
    return found


@torch.inference_mode()
def test_transformers_chooses_blocks_as_the_definition_says(engine: Any) -> None:
    model, ids, seen = engine.torch_model, tokens(rows=1), []
    indexer = model.model.layers[SITES[0]].self_attn.indexer
    hook = indexer.register_forward_hook(
        lambda module, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True
    )
    model(ids, use_cache=False)
    hook.remove()
    [((hidden, (cos, sin), *_), _, out)] = seen
    expected = defined(indexer, hidden[0], cos[0], sin[0])
    for head, rows in enumerate(expected):
        for position, blocks in enumerate(rows):
            assert {item for item in out[0, head, position].tolist() if item >= 0} == blocks, (head, position)
    assert expected[0] != expected[1]  # each head chooses for itself


def test_all_f_is_the_model_itself_and_s_layers_attend_to_the_nearest_choice(engine: Any) -> None:
    ids = tokens()
    with torch.inference_mode():
        plain = engine.torch_model(ids, use_cache=False).logits
        with apply_roles(engine.torch_model, Pattern.full(len(SITES))):
            assert torch.equal(engine.torch_model(ids, use_cache=False).logits, plain)
        with apply_roles(engine.torch_model, Pattern("FSFSS")):
            shared = engine.torch_model(ids, use_cache=False).logits
    assert torch.equal(shared[:, :TOKENS], plain[:, :TOKENS])  # all blocks are chosen: nothing can differ
    assert not torch.allclose(shared[:, TOKENS:], plain[:, TOKENS:])
    found = chosen_blocks(engine, Pattern("FSFSS"), ids)
    assert found[1] is found[0] and found[3] is found[2] and found[4] is found[2] and found[0] is not found[2]


def test_the_engine_is_of_its_own_kind_and_runs_from_prefixes(engine: Any) -> None:
    """A later pattern begins where it first differs, and loses what it loses from the beginning."""
    assert type(engine) is BlockEngine and engine.settings["attention"] == "naive"
    held, plans = data(), [Pattern("FFFFF"), Pattern("FFFSF"), Pattern("FSFSF"), Pattern("FSSSS")]
    kept = {item.pattern: item for item in engine.evaluate(plans, held, "nll")}
    fresh = {item.pattern: item for item in engine.evaluate(plans, held, "nll", fresh=True)}
    assert {plan: item.losses for plan, item in kept.items()} == {plan: item.losses for plan, item in fresh.items()}
    assert len({item.losses for item in kept.values()}) == len(plans)
    assert sum(kept[plans[1]].layer_tokens) < sum(fresh[plans[1]].layer_tokens)


def test_overlap_is_of_blocks_and_selections_have_a_row_for_each_head(engine: Any) -> None:
    held = data()
    overlap = engine.matrix("overlap", held, 8)
    assert overlap.shape == (5, 5) and np.allclose(np.diag(overlap), 1) and np.allclose(overlap, overlap.T)
    assert 0.25 <= overlap.min() < 1  # the own block is chosen by all
    similar = engine.matrix("similarity", held, 8)
    assert np.allclose(np.diag(similar), 1) and (similar[1, 0] < 1).all()
    found = engine.selections(Pattern("FSFSS"), held, 0, 3)
    assert set(found) == {0, 2} and found[0].shape == (2, 3, TOPK)
    assert (
        np.sort(found[0][:, -1]) == np.sort(chosen_blocks(engine, Pattern("FSFSS"), tokens(rows=2)[:1])[0][0, :, -1])
    ).all()


def test_a_search_finds_a_pattern(saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "tokens.jsonl"
    rng = np.random.default_rng(2)
    rows = rng.integers(2, VOCAB, (12, LENGTH)).tolist()
    source.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    folders = [
        "--model",
        str(saved),
        "--calibration",
        str(source),
        "--output",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    sizes = f"--seq-len {LENGTH} --num-sequences 4 --num-eval-sequences 4 --retain 2/5".split()
    result = CliRunner().invoke(search_app, [*folders, *sizes])
    assert result.exit_code == 0, result.output
    file = PatternFile.load(tmp_path / "out" / "pattern.yaml")
    pattern = file.as_pattern()
    assert len(pattern) == len(SITES) < LAYERS and len(pattern.full_layers) == 2 and pattern.full_layers[0] == 0
    assert file.model.architecture == "MiniMaxM3VLForCausalLM"
