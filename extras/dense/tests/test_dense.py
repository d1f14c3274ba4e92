"""Dense models: what is one, and what a pattern of pages costs it."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from indexcache_dense.family import DENSE_GQA
from indexcache_dense.hf import pages
from indexcache_dense.hf.engine import PageEngine
from indexcache_dense.hf.pages import apply_page_roles
from indexcache_dense.selection import DEFAULT, Heads, Selection
from indexcache_dense.strategies.shift import shift_pattern
from indexcache_search.data.packing import Packer
from indexcache_search.data.reader import TokenReader
from indexcache_search.errors import DataError
from scripts.tools.pattern_files import pattern_file
from sglang_indexcache import Pattern
from sglang_indexcache.check import main as check
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.io.errors import ModelConfigError, PatternError, SpellingError
from sglang_indexcache.serving.preflight import refused_flags
from tests.conftest import (
    LAYERS,
    PAGES,
    VOCAB,
    random_tokens,
    save_model,
    tiny_config,
    tiny_dense_config,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# -- the family


def test_every_layer_is_a_site(dense_folder: Path) -> None:
    model = describe(tiny_dense_config("qwen3"), "tiny")
    assert family_of(model.architecture) is DENSE_GQA
    assert model.layers == tuple(range(LAYERS)) and model.native == Pattern("D" * LAYERS, DEFAULT)
    assert model.first_sparse_position == 1024
    assert (
        DENSE_GQA.checkpoint.selecting(model, PAGES).first_sparse_position == 16
        and DENSE_GQA.checkpoint.selecting(model, None) == model
    )
    checkpoint = Checkpoint.read(str(dense_folder))
    assert checkpoint.indexer_layers == set(range(LAYERS)) and checkpoint.locked == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 128}, "sliding_window is 128, expected layers that see all"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"layer_types": "full"}, "layer_types has 'full', expected full_attention alone"),
        ({"num_key_value_heads": 3}, "4 heads share 3 key heads, expected a divisor"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "some of its layers see a sliding window; expected "),
        (
            {"architectures": ["DeepseekV3ForCausalLM"]},
            r"its latent attention \(MLA\) is dense; docs/distill.md says how indexers are trained",
        ),
        ({"architectures": ["GptOssForCausalLM"]}, "attention sinks"),
    ],
)
def test_models_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        describe(tiny_dense_config(**changes), "tiny")


def test_a_window_that_is_not_used_is_none() -> None:
    describe(tiny_dense_config("qwen2", sliding_window=128, use_sliding_window=False), "tiny")
    describe(tiny_dense_config(num_key_value_heads=None), "tiny")


def test_patterns_of_the_other_kind_are_refused(tmp_path: Path, dense_folder: Path) -> None:
    glm = save_model(tiny_config(), tmp_path / "glm")
    dense, sparse = Pattern("DSSDSS", PAGES), Pattern("FSSFSS")
    assert not Checkpoint.read(str(dense_folder)).misfits(dense) and not Checkpoint.read(str(glm)).misfits(sparse)
    [first, *_] = Checkpoint.read(str(dense_folder)).misfits(sparse)
    assert str(first) == "pattern is of F and S without a selection, the model is dense; expected D and S with one"
    [first, *_] = Checkpoint.read(str(glm)).misfits(dense)
    assert str(first) == "pattern has a selection, but the model's own indexers choose; expected F and S alone"
    with pytest.raises(PatternError, match="glm has indexers that choose; expected no selection"):
        family_of("GlmMoeDsaForCausalLM").checkpoint.selecting(describe(tiny_config(), "glm"), PAGES)


def test_which_overrides_sglang_gets() -> None:
    pattern = Pattern("DSSDSS", PAGES)
    assert DENSE_GQA.sglang.to_overrides({"rope_scaling": None}, pattern) == {"rope_scaling": None}
    with pytest.raises(SpellingError, match="num_hidden_layers changes which layers there are"):
        DENSE_GQA.sglang.to_overrides({"num_hidden_layers": 4}, pattern)
    with pytest.raises(SpellingError, match="layer 3 is F, which is not served with score token_max"):
        DENSE_GQA.sglang.to_overrides({}, Pattern("DSSFSS", PAGES))


def test_check_shows_the_selection(dense_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    pattern_file(Pattern("DSSDSS", PAGES), tiny_dense_config(), dense_folder.name).save(path)
    assert check([str(path), "--model", str(dense_folder)]) == 0
    text = capsys.readouterr().out
    assert "2 of 6 layers D, fingerprint " in text
    assert "selection 4 pages of 4 tokens (1 recent), by token_max\n" in text
    pattern_file(Pattern("DSSDSS", replace(PAGES, heads="key")), tiny_dense_config(), dense_folder.name).save(path)
    assert check([str(path), "--model", str(dense_folder)]) == 1
    text = capsys.readouterr().out
    assert "by token_max, for each key head\n" in text
    assert "problem: selection 4|4|1|0|token_max|none||key is not served yet: heads is key, expected joint" in text
    pattern_file(Pattern("DSSDSS", PAGES), tiny_dense_config(), dense_folder.name).save(path)
    assert "     4      4  S              3\n" in text
    pattern_file(Pattern("DFSFSS", PAGES), tiny_dense_config(), dense_folder.name).save(tmp_path / "f.yaml")
    assert check([str(tmp_path / "f.yaml"), "--model", str(dense_folder)]) == 1
    text = capsys.readouterr().out
    assert "1 of 6 layers D and 2 F, fingerprint " in text
    assert "problem: layer 1 is F, which is not served with score token_max; expected compressed_keys" in text
    assert check([str(path), "--model", str(dense_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["selection"]["pages"] == 4


# -- data


class Tokenizer:
    """A chat template: a role's letter, the text, and behind an assistant's an end; a token a letter."""

    eos_token_id = 2
    chat_template = "of this class"

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **_: Any) -> str:
        text = ""
        for number, message in enumerate(messages):
            text += "U" if message["role"] == "user" else "A"
            keeps = not self.forgets or number == len(messages) - 1
            text += message["content"] if keeps else ""
            text += "E" if message["role"] == "assistant" else ""
        return text + "A" if add_generation_prompt else text

    def encode(self, text: str, **_: Any) -> list[int]:
        return [{"U": 3, "A": 4, "E": 2}.get(letter, 10 + ord(letter) % 64) for letter in text]


def rows(path: Path, count: int = 12) -> str:
    turns = [("user", "ab"), ("assistant", "cdefghijkl"), ("user", "mn"), ("assistant", "opqrstuvwx")]
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": role, "content": text + "yz"[: n % 3]} for role, text in turns]}) + "\n"
            for n in range(count)
        )
    )
    return str(path)


def test_prompts_are_dense_and_replies_count(tmp_path: Path) -> None:
    model = DENSE_GQA.checkpoint.selecting(describe(tiny_dense_config(), "tiny"), replace(PAGES, pages=2))
    reader = TokenReader(lambda: Tokenizer(), VOCAB, 28, replies=True)
    data = Packer(reader, model, 28).held_out([rows(tmp_path / "chat.jsonl", 2)], 1)
    assert data.prompt is not None
    written = data.tokens[0][~data.prompt[0]]
    read = data.tokens[0][data.prompt[0]].tolist()
    assert read[:3] == [3, 10 + ord("a") % 64, 10 + ord("b") % 64] and read.count(3) == read.count(4) == 2
    assert (written == 2).sum() >= 1 and 3 not in written and 4 not in written
    assert data.scored[0].nonzero()[0].min() > model.first_sparse_position
    assert not (data.scored & data.prompt).any()
    assert replace(data, prompt=None).sha256 != data.sha256
    assert np.array_equal(data.taken([0]).prompt, data.prompt)  # type: ignore[arg-type]


def test_templates_that_rewrite_are_refused(tmp_path: Path) -> None:
    reader = TokenReader(lambda: Tokenizer(forgets=True), VOCAB, 28, replies=True)
    with pytest.raises(DataError, match="can't be told from prompts; expected another --rows chat_template, or"):
        next(reader.documents(rows(tmp_path / "chat.jsonl"), 0))


# -- the engine


def engine(selection: Selection = PAGES, **options: Any) -> PageEngine:
    config = tiny_dense_config()
    model = tiny_model(config)
    model.set_attn_implementation("eager")
    return PageEngine(model, DENSE_GQA.checkpoint.selecting(describe(config, "tiny"), selection), **options)


PATTERNS = [Pattern(roles, PAGES) for roles in ("DDDDDD", "DSSDSS", "DSSSSS", "DDSSSS", "DSDSDF", "DSSDSD", "DFSSSS")]


@pytest.mark.parametrize("objective", ["nll", "kl"])
def test_prefix_reuse_changes_no_bit(objective: Any) -> None:
    data = random_tokens(3, 48, first_sparse_position=16)
    data = replace(data, prompt=np.arange(48) < np.asarray([[20], [5], [0]]))
    reusing, plain = engine(), engine(prefix_cache_gb=0)
    found = {item.pattern: item for item in reusing.evaluate(PATTERNS, data, objective)}
    expected = {item.pattern: item for item in plain.evaluate(PATTERNS, data, objective)}
    assert {pattern: item.losses for pattern, item in found.items()} == {
        pattern: item.losses for pattern, item in expected.items()
    }
    ran = sum(sum(item.layer_tokens) for item in found.values())
    assert ran < 0.8 * sum(sum(item.layer_tokens) for item in expected.values())
    again = next(iter(reusing.evaluate([PATTERNS[1]], data, objective)))
    assert again.losses == found[PATTERNS[1]].losses
    assert again.layer_tokens == (29, 33, 33)  # the last layer, from where something is chosen


@pytest.mark.parametrize("pages", [4, 2])  # the engine's own, and fewer
@pytest.mark.parametrize("begins", [0, 25])
def test_losses_are_those_of_a_plain_pass(begins: int, pages: int) -> None:
    """The engine reads beginnings once; a plain pass reads whole sequences."""
    data, reference = random_tokens(2, 48, first_sparse_position=16), engine()
    prompt = np.broadcast_to(np.arange(48) < begins, (2, 48))
    data = replace(data, prompt=prompt, scored=data.scored & ~prompt)
    tokens = torch.from_numpy(data.tokens.astype(np.int64))
    pattern = replace(PATTERNS[1], selection=replace(PAGES, pages=pages))
    [found] = reference.evaluate([pattern], data, "nll")
    read = torch.from_numpy(prompt.copy())
    with torch.inference_mode(), apply_page_roles(reference.torch_model, pattern, prompt=read):
        logits = reference.torch_model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
    for row in range(2):
        targets = np.flatnonzero(data.scored[row])
        expected = -sum(logits[row, at - 1, data.tokens[row, at]].item() for at in targets)
        assert found.losses[row] == pytest.approx(expected, rel=1e-5)


def test_beginnings_that_do_not_fit_are_read_again() -> None:
    data, costs = random_tokens(3, 48, first_sparse_position=16), {}
    losses = {}
    for room in (1.0, 0.0):
        one = engine(prefix_cache_gb=0)
        one._beginnings._limit = room * 1e9
        [_, found] = one.evaluate(PATTERNS[:2], data, "nll")
        losses[room], costs[room] = found.losses, sum(found.layer_tokens)
    assert losses[1.0] == losses[0.0]
    assert costs[1.0] == 3 * LAYERS * (48 - 15) and costs[0.0] == 3 * LAYERS * 48


def test_selections_of_one_engine_are_kept_apart() -> None:
    data, reusing = random_tokens(2, 48, first_sparse_position=8), engine()
    few, more = (Pattern("DSSDSS", replace(PAGES, pages=pages)) for pages in (2, 11))
    found = {item.pattern: item.losses for item in reusing.evaluate([few, more], data, "nll")}
    alone = {item.pattern: item.losses for one in (few, more) for item in engine().evaluate([one], data, "nll")}
    assert found == alone and len(set(found.values())) == 2


def test_overlap_is_that_of_pages() -> None:
    data, reference = random_tokens(2, 48, first_sparse_position=16), engine()
    found = reference.matrix("overlap", data, 8)
    assert np.allclose(found.diagonal(), 1.0) and np.allclose(found, found.T)
    assert (found >= 1 / PAGES.pages).all() and found.min() < 1.0  # the recent page is everybody's


@pytest.mark.parametrize("heads", ["joint", "key"])
def test_signals_are_those_of_the_definitions(heads: Heads) -> None:
    """Of one sequence, against attention weights that transformers itself gives out; of the worst key head."""
    data = random_tokens(1, 40, first_sparse_position=16)
    reference = engine(replace(PAGES, heads=heads))
    rows = list(range(16, 40, 23))
    signals = reference.page_signals(data, 2)
    tokens = torch.from_numpy(data.tokens.astype(np.int64))
    with torch.inference_mode():
        out = reference.torch_model(input_ids=tokens, output_attentions=True, output_hidden_states=True)
    weights = [layer[0].double() for layer in out.attentions]
    flat = [torch.stack([layer[:, row].flatten() for row in rows]) for layer in weights]
    moved = [1 - torch.cosine_similarity(one, other, dim=-1).mean() for one, other in pairwise(flat)]
    assert np.allclose(signals["shift"], [[0.0, *moved]], atol=1e-5)
    kept: dict[int, Any] = {}
    with (
        torch.inference_mode(),
        apply_page_roles(reference.torch_model, reference.model.native, observe=kept.__setitem__),
    ):
        reference.torch_model(input_ids=tokens, use_cache=False)
    recall = signals["recall"]
    for layer in range(LAYERS):
        shares = []
        for source in range(layer + 1):
            held = []
            choosers = len(kept[layer])
            assert choosers == (1 if heads == "joint" else 2)
            for row, chooser in itertools.product(rows, range(choosers)):
                by_head = weights[layer].chunk(choosers)[chooser]
                mass = by_head[:, row].mean(0).view(-1, PAGES.page_tokens).sum(1)
                own, other = (kept[item][chooser, row] for item in (layer, source))
                held.append((mass[other].sum() / mass[own].sum()).item())
            shares.append(min(held))
        assert np.allclose(recall[layer, : layer + 1] / recall[layer, layer], shares, atol=1e-4)
        assert (recall[layer, layer + 1 :] == 0).all() and recall[layer, layer] > 0


def test_in_blocks_the_engine_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device with `--engine attention=kernels`."""
    monkeypatch.setattr(pages, "ROWS", 8)
    data = random_tokens(3, 48, first_sparse_position=16)
    plain, blocks = engine(), engine(attention="kernels")
    for one, other in zip(*(item.evaluate(PATTERNS, data, "kl") for item in (plain, blocks)), strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=1e-4, atol=1e-4)
        assert one.pattern == other.pattern and one.layer_tokens == other.layer_tokens
    found, again = plain.page_signals(data, 16), blocks.page_signals(data, 16)
    for name in ("overlap", "shift", "recall"):
        np.testing.assert_allclose(found[name], again[name], atol=1e-5)


def test_shift_takes_the_largest_of_each_part() -> None:
    native = Pattern("D" * 12, PAGES)
    shift = np.asarray([0, 9, 9, 1, 2, 8, 1, 7, 1, 1, 1, 3.0])
    assert shift_pattern(shift, 5, native).full_layers == (0, 1, 2, 5, 11)
    assert shift_pattern(shift, 2, native).full_layers == (0, 1)
    assert shift_pattern(shift, 12, native) == native


# -- what SGLang can't be started with


@pytest.mark.parametrize("name", DENSE_GQA.sglang.refused_flags)
def test_flags_that_are_refused(name: str) -> None:
    given: Any = 2 if name.endswith("_size") else "NGRAM" if name.endswith("algorithm") else True
    [(flag, reason)] = refused_flags(DENSE_GQA.sglang.refused_flags, SimpleNamespace(**{name: given}))
    assert flag == "--" + name.replace("_", "-") and reason
    for harmless in (None, False, 1, "") if name.endswith("_size") else (None, False, ""):
        assert not list(refused_flags(DENSE_GQA.sglang.refused_flags, SimpleNamespace(**{name: harmless})))
