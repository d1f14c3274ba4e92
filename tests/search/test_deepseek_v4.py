"""DeepSeek-V4: its config.json, roles on transformers' model, and the engine's shortcuts beside the plain way."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.evaluator import Evaluator
from indexcache_search.evaluation.identity import identity
from indexcache_search.evaluation.journal import Journal
from indexcache_search.hf.roles import apply_roles
from indexcache_search.searching.search import Search
from indexcache_search.searching.settings import Settings
from indexcache_search.strategies import strategy_of
from sglang_indexcache import Pattern
from sglang_indexcache.families import describe
from sglang_indexcache.families.deepseek_v4 import DEEPSEEK_V4
from sglang_indexcache.families.deepseek_v4.sglang import DeepseekV4Sglang
from sglang_indexcache.io.errors import ModelConfigError, ProofError, SpellingError
from sglang_indexcache.io.messages import NOT_COMBINED, NOT_LOADED, WOULD_RUN
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving import proof, ranks
from sglang_indexcache.serving.preflight import Preflight, PreflightError
from sglang_indexcache.serving.proof import effective_roles, mark_unloaded, mismatch
from sglang_indexcache.serving.proven import ProofHolder
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.probes import SglangSource
from tests.conftest import TOPK, V4_LAYERS, random_tokens, tiny_engine, tiny_model, tiny_v4_config

LETTERS = len(V4_LAYERS)
SEQ_LEN = 160
FIRST_DIFFERENCE = 4 * (TOPK + 1) - 1  # where one entry more than k is complete
PATTERNS = [Pattern(roles) for roles in ("FFFF", "FSFF", "FFSS", "FSFS", "FSSF", "FSSS")]

SERVED = DEEPSEEK_V4.sglang


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(3, 96, (rows, SEQ_LEN), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=tokens(), use_cache=False).logits


def test_letters_are_the_layers_with_an_indexer() -> None:
    model = describe(tiny_v4_config(), "v4")
    assert model.layers == V4_LAYERS
    assert model.native == Pattern.full(LETTERS)
    assert model.first_sparse_position == 4 * TOPK
    flash = [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0]
    assert describe(tiny_v4_config(num_hidden_layers=43, compress_ratios=flash), "flash").num_layers == 21


def test_what_transformers_saves_is_read_alike() -> None:
    config = tiny_v4_config()
    saved = tiny_model(config).config.to_dict()
    assert "compress_ratios" not in saved
    saved["architectures"] = config["architectures"]
    assert describe(saved, "saved").layers == V4_LAYERS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v41"}, "v4: DeepSeek-V4.1 was trained with indexers that layers share; expected V4"),
        ({"index_source_layer_ids": [2]}, "v4: DeepSeek-V4.1 was trained with indexers that layers share; expected V4"),
        (
            {"compress_ratios": [0, 0, 4, 2, 4, 128, 4, 4]},
            "v4: config.json: compress_ratios has 2 for layer 3; expected 0 or 4 or 128",
        ),
        (
            {"compress_ratios": [0, 0, 4, True, 4, 128, 4, 4]},
            "v4: config.json: compress_ratios has True for layer 3; expected 0 or 4 or 128",
        ),
        (
            {"compress_ratios": [0, 4, "4"] * 3},
            "v4: config.json: compress_ratios has '4' for layer 2; expected 0 or 4 or 128",
        ),
        ({"compress_ratios": [0, 4]}, "v4: config.json: compress_ratios is [0, 4], expected one for each layer"),
        ({"compress_ratios": None}, "v4: config.json: layer_types is None, expected one for each layer"),
        (
            {"compress_ratios": None, "layer_types": ["full_attention"] * 8},
            "v4: config.json: layer_types has 'full_attention' for layer 0; expected sliding_attention or"
            " compressed_sparse_attention or heavily_compressed_attention",
        ),
        ({"compress_ratios": [0] * 8}, "v4: config.json: no layer has compression ratio 4, so none has an indexer"),
        (
            {"compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 128}},
            "v4: config.json: compress_rates is {'compressed_sparse_attention': 8, 'heavily_compressed_attention': 12"
            "8}, expected 4 and 128",
        ),
        ({"index_topk": 0}, "v4: config.json: index_topk is 0, expected a positive integer"),
        ({"num_hidden_layers": 5000}, "v4: config.json: 5000 layers, expected at most 4096"),
    ],
)
def test_a_config_that_is_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        describe(tiny_v4_config(**changes), "v4")
    assert str(error.value) == message


def test_weights_of_indexers_by_any_of_their_names() -> None:
    names = [
        "layers.2.attn.indexer.wq_b.weight",
        "model.layers.4.self_attn.indexer.compressor.ape",
        "model.layers.6.self_attn.compressor.indexer.q_b_proj.weight",
        "layers.7.attn.compressor.wkv.weight",
        "model.layers.7.self_attn.compressor.kv_proj.weight",
    ]
    assert DEEPSEEK_V4.checkpoint.indexer_layers(names) == {2, 4, 6}


def test_overrides_pass_unless_they_touch_the_choice() -> None:
    pattern = Pattern("FSSF")
    assert SERVED.to_overrides({"rope_theta": 1}, pattern) == {"rope_theta": 1}
    with pytest.raises(SpellingError, match="compress_ratios changes which layers choose; expected a file made for"):
        SERVED.to_overrides({"compress_ratios": [4] * 8}, pattern)
    with pytest.raises(SpellingError, match="index_topk_freq is not read on DeepSeek-V4; expected the pattern file"):
        SERVED.to_overrides({"index_topk_freq": 4}, pattern)


def test_all_full_is_the_untouched_model() -> None:
    model = tiny_model(tiny_v4_config())
    untouched = logits(model)
    with apply_roles(model, Pattern.full(LETTERS)):
        assert torch.equal(logits(model), untouched)
    assert not any("forward" in selector.__dict__ for selector in DEEPSEEK_V4.transformers.indexer_modules(model))


@pytest.mark.parametrize("pattern", PATTERNS[1:], ids=str)
def test_shared_layers_attend_to_their_sources_choice_and_differ_where_there_is_one(pattern: Pattern) -> None:
    model, ran = tiny_model(tiny_v4_config()), []
    untouched = logits(model)
    hooks = [
        selector.kv_proj.register_forward_hook(lambda *_, _letter=letter: ran.append(_letter))
        for letter, selector in enumerate(DEEPSEEK_V4.transformers.indexer_modules(model))
    ]
    seen: dict[int, torch.Tensor] = {}
    with apply_roles(model, pattern, seen.__setitem__):
        shared = logits(model)
    for hook in hooks:
        hook.remove()
    assert tuple(ran) == pattern.full_layers
    assert all(seen[letter] is seen[source] for letter, source in enumerate(pattern.source_layers))
    differs = (shared != untouched).any(-1)
    assert differs.any(0).nonzero()[0].item() == FIRST_DIFFERENCE
    assert torch.equal(logits(model), untouched)


def test_prefixes_are_reused_bit_for_bit() -> None:
    engine = tiny_engine(tiny_v4_config(), batch_size=2)
    data = random_tokens(seq_len=SEQ_LEN, first_sparse_position=4 * TOPK)
    reused = {item.pattern: item for item in engine.evaluate(PATTERNS, data, "kl")}
    plain = tiny_engine(tiny_v4_config(), batch_size=2)
    for item in plain.evaluate(PATTERNS, data, "kl", fresh=True):
        assert reused[item.pattern].losses == item.losses
    ran = sum(sum(item.layer_tokens) for item in reused.values())
    assert ran < 0.75 * len(PATTERNS) * LETTERS * data.tokens.size
    assert reused[Pattern.full(LETTERS)].losses == (0.0,) * 3
    assert min(reused[Pattern("FSSS")].losses) > 0


def test_a_cache_that_is_too_small_is_not_used() -> None:
    engine = tiny_engine(tiny_v4_config(), prefix_cache_gb=2e-4)  # hc_mult streams, of which one would have room
    data = random_tokens(sequences=1, seq_len=SEQ_LEN, first_sparse_position=4 * TOPK)
    [evaluation] = engine.evaluate([Pattern("FSSF")], data, "nll")
    assert evaluation.layer_tokens == (LETTERS * SEQ_LEN,)
    assert len(engine._cache) == 0


def test_overlap_and_similarity_are_those_of_the_definitions() -> None:
    config = tiny_v4_config()
    engine, model = tiny_engine(config), tiny_model(config)
    data = random_tokens(sequences=1, seq_len=SEQ_LEN, first_sparse_position=4 * TOPK)
    chosen: dict[int, torch.Tensor] = {}
    outputs: dict[str, dict[int, torch.Tensor]] = {}

    def run(pattern: str) -> None:
        outputs[pattern] = {}
        hooks = [
            model.model.layers[layer].self_attn.register_forward_hook(
                lambda _m, _i, output, _letter=letter: outputs[pattern].__setitem__(_letter, output[0])
            )
            for letter, layer in enumerate(V4_LAYERS)
        ]
        with torch.inference_mode(), apply_roles(model, Pattern(pattern), chosen.__setitem__):
            model(input_ids=torch.from_numpy(data.tokens.astype(np.int64)), use_cache=False)
        for hook in hooks:
            hook.remove()

    run("FSSS")
    run("FFFF")  # the last one: its indices stay in `chosen`
    overlap = engine.matrix("overlap", data, SEQ_LEN)
    sets = [[set(row) for row in chosen[letter][0, 4 * TOPK :].tolist()] for letter in range(LETTERS)]
    for one in range(LETTERS):
        for other in range(LETTERS):
            common = [len(a & b) / TOPK for a, b in zip(sets[one], sets[other], strict=True)]
            assert overlap[one, other] == pytest.approx(np.mean(common))
    similarity = engine.matrix("similarity", data, 8)
    rows = slice(4 * TOPK, None)
    expected = torch.cosine_similarity(outputs["FFFF"][1][:, rows], outputs["FSSS"][1][:, rows], dim=-1).mean()
    assert similarity[1, 0] == pytest.approx(expected.item(), abs=1e-5)
    assert similarity.diagonal().tolist() == [1.0] * LETTERS


def test_kernels_are_not_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from indexcache_search.engines import transformers as module
    from tests.conftest import save_model

    monkeypatch.setattr(module, "resolve_attention", lambda attention, _: "kernels")
    folder = str(save_model(tiny_v4_config(), tmp_path / "v4"))
    with pytest.raises(
        SearchError, match="--engine attention=kernels does not run DeepseekV4ForCausalLM; expected auto"
    ):
        TransformersEngine.load(folder, "cpu", attention="kernels")
    assert TransformersEngine.load(folder, "cpu").settings["attention"] == "naive"


class Redundant(torch.nn.Module):
    """Chooses what the indexer of an earlier layer would choose there, whatever runs in that layer."""

    def __init__(self, model: Any, layer: int) -> None:
        super().__init__()
        compressor = model.model.layers[layer].self_attn.compressor
        self._run, self._inputs = type(compressor.indexer).forward.__get__(compressor.indexer), {}
        compressor.register_forward_pre_hook(lambda _, args: self._inputs.update(args=args))

    def forward(self, *_: Any) -> torch.Tensor:
        return self._run(*self._inputs["args"])


@pytest.mark.parametrize("strategy", [pytest.param("greedy", marks=pytest.mark.slow), "lazy"])
def test_the_search_shares_exactly_what_is_redundant(strategy: str, tmp_path: Any) -> None:
    """Letters 2 and 4 of 6 copy the scores of the letter before: sharing them costs nothing, anything else does."""
    config = tiny_v4_config(num_hidden_layers=8, compress_ratios=[0, 4, 4, 4, 128, 4, 4, 4])
    model, description = tiny_model(config), describe(config, "tiny")
    for letter in (2, 4):
        compressor = model.model.layers[description.layers[letter]].self_attn.compressor
        compressor.indexer = Redundant(model, description.layers[letter - 1])
    engine = TransformersEngine(model, description)
    data = random_tokens(sequences=4, seq_len=SEQ_LEN, first_sparse_position=4 * TOPK)
    settings = Settings(retain=(Fraction(2, 3),), strategy=strategy_of(strategy))
    with Journal(tmp_path, identity(engine, data, data, "kl"), {}) as journal:
        calibration = Evaluator(engine, data, "kl", journal, "calibration")
        found = Search(engine, calibration, settings.strategy, settings.goal(description)).find()
    assert found.patterns[Fraction(2, 3)] == Pattern("FFSFSF")
    [evaluation] = engine.evaluate([Pattern("FFSFSF")], data, "kl")
    assert sum(evaluation.losses) == pytest.approx(0, abs=1e-9)


# -- SGLang's modules, with stand-ins


class C4Indexer(nn.Module):
    """Carries what SGLang's carries."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.wq_b, self.compressor = layer_id, nn.Linear(2, 2), nn.Module()
        self.compressor.ape = nn.Parameter(torch.zeros(4, 2))

    def forward(self) -> str:
        return "scored"


def loaded_model(layers: Sequence[int] = V4_LAYERS) -> SimpleNamespace:
    """A runner with a pipeline stage of these layers' indexers; upper layers come first, as in no SGLang so far."""
    model = nn.ModuleList([nn.Sequential(C4Indexer(layer)) for layer in reversed(layers)])
    config = tiny_v4_config()
    model.config = SimpleNamespace(**{key: config[key] for key in ("compress_ratios", "num_hidden_layers")})
    return SimpleNamespace(model=model, is_draft_worker=False)


def found_on(runner: SimpleNamespace, pattern: str) -> str | None:
    return mismatch(Pattern(pattern), effective_roles(SERVED, runner.model), SERVED.begins_every_stage, SERVED.place)


def test_roles_are_written_and_read_back() -> None:
    runner = loaded_model()
    assert found_on(runner, "FSSF") == f"letter 1 {WOULD_RUN} F, the pattern says S" and SERVED.configured(runner) == ""
    for roles in ("FSSF", "FFSS", "FFFF"):
        SERVED.loaded(runner, Pattern(roles))
        assert found_on(runner, roles) is None and SERVED.configured(runner) == roles
        outputs = {module.layer_id: module() for module in runner.model.modules() if isinstance(module, C4Indexer)}
        assert outputs == {
            layer: "scored" if role == "F" else None for layer, role in zip(V4_LAYERS, roles, strict=True)
        }
    assert not any("forward" in module.__dict__ for module in runner.model.modules())


def test_draft_models_have_no_sites() -> None:
    assert list(SERVED.modules(nn.Linear(2, 2))) == []  # nor a configuration of compression


def test_what_the_loaded_model_may_not_be() -> None:
    runner = loaded_model((6, 7))
    SERVED.loaded(runner, Pattern("FSSF"))
    assert found_on(runner, "FSSF") == (
        "letter 2 is the first of its pipeline stage, where nothing was chosen yet: expected F"
    )
    SERVED.loaded(runner, Pattern("FSFS"))
    assert found_on(runner, "FSFS") is None
    for layers, layer in (((2, 3), 3), ((2, 4, 4), 4)):
        with pytest.raises(ProofError, match=f"layer {layer} of the loaded model has an indexer, its configuration"):
            effective_roles(SERVED, loaded_model(layers).model)
    wrapped = loaded_model()
    [*_, first] = wrapped.model
    first[0].forward = lambda: "something else"
    for read in (lambda: SERVED.loaded(wrapped, Pattern("FSSF")), lambda: effective_roles(SERVED, wrapped.model)):
        with pytest.raises(ProofError, match="the indexer of letter 0 runs another forward: function"):
            read()


@pytest.mark.parametrize("name", ["wq_b.weight", "compressor.ape"])
def test_parameters_that_were_not_loaded_are_found_in_f_layers(name: str) -> None:
    runner = loaded_model()
    mark_unloaded(SERVED, runner.model)
    for module in runner.model.modules():
        if isinstance(module, C4Indexer):
            for key, parameter in module.named_parameters():
                if key != name or module.layer_id in (4, 6):
                    parameter.data.zero_()
    SERVED.loaded(runner, Pattern("FSSF"))
    assert found_on(runner, "FSSF") == f"letter 0 is F, but {NOT_LOADED} {name}"


def test_a_switch_that_fails_ends_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "all_ranks", lambda told: [told])
    monkeypatch.setattr(DeepseekV4Sglang, "switch", lambda *_: {}["gone"])
    asked = SimpleNamespace(
        pattern=Pattern("FSSF"), family=DEEPSEEK_V4, proven=ProofHolder(), asked=Asked(), weights_sha256=""
    )
    with pytest.raises(ProofError, match="KeyError: 'gone'"):
        proof.prove(asked, loaded_model())


@pytest.mark.parametrize(
    ("flag", "value", "refused"),
    [
        ("enable_hisparse", True, True),
        ("enable_hisparse", False, False),
        ("attn_cp_size", 2, True),
        ("attn_cp_size", 1, False),
        ("enable_prefill_cp", True, True),
        ("enable_return_indexer_topk", True, True),
    ],
)
def test_flags_that_can_not_be_combined_with_it(
    flag: str, value: Any, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Preflight(PatternSpec.read("FSSF"), Asked(), SglangSource(Path(), "0.0"))
    monkeypatch.setattr(check, "family_at", lambda _: DEEPSEEK_V4)
    arguments = SimpleNamespace(model_path="x", **{flag: value})
    if refused:
        with pytest.raises(PreflightError, match=f"--{flag.replace('_', '-')} {NOT_COMBINED}: "):
            check.check(arguments)
    else:
        check.check(arguments)
