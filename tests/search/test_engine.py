"""The transformers engine: losses, prefix reuse, overlap and similarity, each against a plain computation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from indexcache_search.engines import prefix
from indexcache_search.engines import transformers as transformers_engine
from indexcache_search.engines.prefix import Copy, LayerState, PrefixCache, place
from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.hf.loading import describe_model
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.override import indexer_types
from sglang_indexcache.io.errors import FileError, ModelConfigError, PatternError
from tests.conftest import LAYERS, TOPK, random_tokens, save_model, tiny_config, tiny_engine

CPU = torch.device("cpu")
PATTERNS = [Pattern(roles) for roles in ("FFFFFF", "FSFFFF", "FFFFFS", "FFSSFF", "FSSSSS", "FFFSFF")]


def by_pattern(engine: TransformersEngine, objective: Any = "nll", **options: Any) -> dict[str, Evaluation]:
    data = random_tokens(**options)
    return {item.pattern.roles: item for item in engine.evaluate(PATTERNS, data, objective)}


def test_losses_are_those_of_the_scored_positions(config: dict[str, Any]) -> None:
    engine, data = tiny_engine(config), random_tokens()
    pattern = Pattern("FSFFSF")
    [evaluation] = engine.evaluate([pattern], data, "nll")
    tokens = torch.from_numpy(data.tokens.astype(np.int64))
    for row in range(data.num_sequences):
        with torch.inference_mode(), apply_roles(engine.torch_model, pattern):
            logits = engine.torch_model(tokens[row : row + 1]).logits[0]
        # Target t is scored from position t - 1, which sees t > k tokens.
        predicted, targets = logits[TOPK:-1], tokens[row, TOPK + 1 :]
        losses = F.cross_entropy(predicted.double(), targets, reduction="sum").item()
        assert evaluation.losses[row] == pytest.approx(losses, rel=1e-5)
        assert evaluation.correct[row] == int((predicted.argmax(-1) == targets).sum())
        assert evaluation.tokens[row] == data.seq_len - TOPK - 1


def test_the_kernels_give_the_same(config: dict[str, Any]) -> None:
    for objective in ("nll", "kl"):
        naive = by_pattern(tiny_engine(config), objective)
        engine = tiny_engine(config, attention="kernels")  # on CPU their definitions run, without dense scores as well
        for roles, evaluation in by_pattern(engine, objective).items():
            assert evaluation.losses == pytest.approx(naive[roles].losses, rel=1e-4, abs=1e-5)
    assert engine.settings["attention"] == "kernels"
    data = random_tokens()
    np.testing.assert_allclose(engine.matrix("overlap", data, 8), tiny_engine(config).matrix("overlap", data, 8))
    np.testing.assert_allclose(
        engine.matrix("similarity", data, 8), tiny_engine(config).matrix("similarity", data, 8), atol=1e-4
    )


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("fast", "--engine has attention=fast, expected one of auto, naive, kernels"),
        ("kernels", "--engine attention=kernels needs a CUDA device, found cpu; expected auto or naive"),
    ],
)
def test_an_attention_that_is_not_there(attention: str, message: str) -> None:
    with pytest.raises(SearchError) as error:
        TransformersEngine.load("anything", "cpu", attention=attention)
    assert str(error.value) == message


def test_auto_takes_the_kernels_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = transformers_engine.resolve_attention
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve("auto", cpu) == resolve("naive", cuda) == "naive" and resolve("auto", cuda) == "kernels"
    monkeypatch.delattr("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaAttention.expand_kv")
    assert resolve("auto", cuda) == "naive"
    with pytest.raises(SearchError, match=r"kernels needs another version: transformers is .* to .* has no expand_kv"):
        resolve("kernels", cuda)


def test_a_model_that_the_kernels_can_not_run() -> None:
    engine = tiny_engine(tiny_config(), attention="kernels")
    engine.torch_model.config.model_type = "llama"
    with pytest.raises(SearchError, match="the kernels can't run this model: model_type is llama"):
        by_pattern(engine)


def test_masked_tokens_do_not_count() -> None:
    engine, data = tiny_engine(tiny_config()), random_tokens(sequences=1)
    data.scored[0, 20:] = False
    [evaluation] = engine.evaluate([Pattern.full(LAYERS)], data, "nll")
    assert evaluation.tokens == (20 - TOPK - 1,)


def test_small_logit_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = by_pattern(tiny_engine(tiny_config()))
    monkeypatch.setattr("indexcache_search.engines.transformers.LOGIT_ROWS", 7)
    chunked = by_pattern(tiny_engine(tiny_config()))
    for roles, evaluation in whole.items():
        assert chunked[roles].losses == pytest.approx(evaluation.losses, rel=1e-6)


@pytest.mark.parametrize("objective", ["nll", "kl"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_prefix_reuse_is_bit_identical(config: dict[str, Any], objective: str, batch_size: int) -> None:
    full = by_pattern(tiny_engine(config, batch_size=batch_size, prefix_cache_gb=0.0), objective)
    reused = by_pattern(tiny_engine(config, batch_size=batch_size), objective)
    assert {roles: item.losses for roles, item in reused.items()} == {r: item.losses for r, item in full.items()}


def test_prefix_reuse_with_locked_layers() -> None:
    config = tiny_config(indexer_types=indexer_types(Pattern("FFSFFF")))
    patterns, data = [Pattern("FFSFFF"), Pattern("FFSSFF"), Pattern("FFSFSF")], random_tokens()
    results = [
        {
            item.pattern.roles: item.losses
            for item in tiny_engine(config, prefix_cache_gb=size).evaluate(patterns, data, "nll")
        }
        for size in (0.0, 2.0)
    ]
    assert results[0] == results[1]


def layers_that_run(engine: TransformersEngine) -> list[int]:
    """A list that grows by the number of each layer that really computes."""
    ran: list[int] = []
    for number, layer in enumerate(engine.torch_model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, _number=number: ran.append(_number))
    return ran


def test_prefix_reuse_runs_only_layers_from_the_first_difference(config: dict[str, Any]) -> None:
    engine, data = tiny_engine(config), random_tokens(sequences=1)
    ran = layers_that_run(engine)
    native = Pattern.full(LAYERS)
    [baseline] = engine.evaluate([native], data, "nll")
    assert ran == list(range(LAYERS))
    assert baseline.layer_tokens == (LAYERS * data.seq_len,)
    ran.clear()
    for evaluation in engine.evaluate([native.share(layer) for layer in range(1, LAYERS)], data, "nll"):
        [flipped] = evaluation.pattern.shared_layers
        assert ran == list(range(flipped, LAYERS))  # also in a later call, from what an earlier one left
        assert evaluation.layer_tokens == (len(ran) * data.seq_len,)
        ran.clear()
    list(engine.evaluate([native.share(3).share(5)], data, "nll"))
    assert ran == [5]  # the states of the pattern with one flip are there, too
    ran.clear()
    list(engine.evaluate([native], data, "nll"))
    assert ran == [LAYERS - 1]  # what the last layer left helps no other pattern
    ran.clear()
    list(engine.evaluate([native], data, "nll", fresh=True))
    assert ran == list(range(LAYERS))


def test_only_the_rows_asked_for_run(config: dict[str, Any]) -> None:
    engine, data = tiny_engine(config), random_tokens(sequences=4)
    [whole] = engine.evaluate([PATTERNS[3]], data, "kl", fresh=True)
    ran = layers_that_run(engine)
    [part] = engine.evaluate([PATTERNS[3]], data, "kl", [3, 1], fresh=True)
    assert part.rows == (3, 1)
    assert part.losses == whole.on([3, 1]).losses
    assert len(ran) == 2 * LAYERS


def test_the_prefix_cache_keeps_to_its_limit_and_drops_the_oldest() -> None:
    """Room for four tensors of 128 bytes."""
    cache = PrefixCache(512.0)

    def add(batch: str, prefix: str, indices: Copy | None = None, value: float = 0.0) -> Copy:
        made = [cache.copy(torch.full((32,), value)) for _ in range(1 if indices is not None else 2)]
        assert None not in made
        own = made[-1] if indices is None else indices
        cache.add(batch, prefix, LayerState(made[0], own))
        return own  # the state alone needs the others

    indices = add("a", "F", value=1.0)
    add("a", "FS", indices, 2.0)  # the indices of both are one tensor
    assert len(cache) == 2
    add("a", "FSF", indices, 3.0)
    assert cache.longest("a", Pattern("FSSS"))[0] == 2  # renews F and FS
    add("a", "FF", value=4.0)
    assert cache.longest("a", Pattern("FSFS"))[0] == 2  # FSF was the oldest
    assert cache.longest("a", Pattern("FFFF"))[0] == 2
    assert cache.longest("b", Pattern("FFFF")) == (0, None)
    found = cache.longest("a", Pattern("FFFF"))[1]
    assert found is not None and found.output.to(CPU).eq(4.0).all()
    del found, indices
    assert cache.copy(torch.zeros(1000)) is None and len(cache) == 0  # nothing helps
    assert cache.copy(torch.zeros(60)) is not None  # another size, once all is free again


def test_a_state_that_is_in_use_is_not_overwritten() -> None:
    cache = PrefixCache(256.0)
    output, indices = cache.copy(torch.ones(32)), cache.copy(torch.full((32,), 2.0))
    assert output is not None and indices is not None
    cache.add("a", "F", LayerState(output, indices))
    assert cache.copy(torch.zeros(32)) is None and len(cache) == 0  # a run goes on from it
    assert output.to(CPU).eq(1).all() and indices.to(CPU).eq(2).all()
    del output, indices
    assert cache.copy(torch.zeros(32)) is not None


def test_states_lie_where_four_times_as_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 1)
    free = {cuda: (2000, 9000)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", free.__getitem__)
    assert [place(cuda, size) for size in (0, 500, 501)] == [cuda, cuda, CPU]
    assert place(CPU, 1) == CPU


def test_a_small_prefix_cache_changes_nothing(config: dict[str, Any]) -> None:
    data = random_tokens()
    plenty = tiny_engine(config)
    full = {item.pattern: item.losses for item in plenty.evaluate(PATTERNS, data, "nll")}
    size = plenty._cache._end / 1e9
    for share in (0.02, 0.1, 0.5, 0.9):
        engine = tiny_engine(config, prefix_cache_gb=size * share)
        engine._prefixes_fit = lambda *_: True  # also where a run does not fit
        assert {item.pattern: item.losses for item in engine.evaluate(PATTERNS, data, "nll")} == full
        cache = engine._cache
        assert cache._end <= size * share * 1e9
        cache._states.clear()
        free = sum(room * len(starts) for room, starts in cache._free.items())
        assert free == cache._end  # nothing is held by a run that is over


def test_a_prefix_cache_that_is_too_small_is_said_once(model_folder: Any) -> None:
    for size, said in ((0.0, 0), (1e-6, 1), (0.1, 0)):
        lines: list[str] = []
        engine = TransformersEngine.load(str(model_folder), "cpu", prefix_cache_gb=size, notice=lines.append)
        for _ in range(2):
            list(engine.evaluate(PATTERNS[:2], random_tokens(), "nll"))
        assert len([line for line in lines if "runs in full" in line]) == said
        assert not said or "prefix_cache_gb is 1e-06" in lines[-1]


def test_kl_of_the_native_pattern_is_zero_and_of_others_positive(config: dict[str, Any]) -> None:
    results = by_pattern(tiny_engine(config), "kl")
    assert results["FFFFFF"].losses == (0.0, 0.0, 0.0)
    assert all(value > 1e-4 for roles, item in results.items() if "S" in roles for value in item.losses)


def test_kl_is_the_full_vocabulary_divergence() -> None:
    engine, data = tiny_engine(tiny_config()), random_tokens(sequences=1)
    pattern = Pattern("FSSFSS")
    [evaluation] = engine.evaluate([pattern], data, "kl")
    tokens = torch.from_numpy(data.tokens.astype(np.int64))
    with torch.inference_mode():
        truth = engine.torch_model(tokens).logits[0, TOPK:-1].double().log_softmax(-1)
        with apply_roles(engine.torch_model, pattern):
            other = engine.torch_model(tokens).logits[0, TOPK:-1].double().log_softmax(-1)
    assert evaluation.losses[0] == pytest.approx((truth.exp() * (truth - other)).sum().item(), rel=1e-4)


def selections(engine: TransformersEngine, data: Any, row: int) -> dict[int, list[set[int]]]:
    """The sets of tokens each layer's queries select, all-F."""
    seen: dict[int, torch.Tensor] = {}
    tokens = torch.from_numpy(data.tokens[row : row + 1].astype(np.int64))
    with torch.inference_mode(), apply_roles(engine.torch_model, engine.model.native, seen.__setitem__):
        engine.torch_model(tokens)
    return {layer: [set(query.tolist()) for query in indices[0]] for layer, indices in seen.items()}


def test_overlap_counts_common_tokens(config: dict[str, Any]) -> None:
    engine, data = tiny_engine(config), random_tokens(sequences=2)
    expected = np.zeros((LAYERS, LAYERS))
    for row in range(2):
        sets = selections(engine, data, row)
        for i in range(LAYERS):
            for j in range(LAYERS):
                common = [len(sets[i][q] & sets[j][q]) / TOPK for q in range(TOPK, data.seq_len)]
                expected[i, j] += np.mean(common) / 2
    measured = engine.matrix("overlap", data, 1000)
    np.testing.assert_allclose(measured, expected, atol=1e-9)
    assert np.all(np.diag(measured) == 1.0)
    assert np.abs(engine.matrix("overlap", data, 16) - expected).max() < 0.2  # a sample of the same


def test_similarity_compares_own_with_reused_indices(config: dict[str, Any]) -> None:
    """Against a second way: run the pattern that only flips layer i onto j's indices, and compare layer i's output."""
    engine, data = tiny_engine(config), random_tokens(sequences=1)
    measured = engine.matrix("similarity", data, 8)
    tokens = torch.from_numpy(data.tokens.astype(np.int64))

    def attention_output(layer: int, pattern: Pattern) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        attention = engine.torch_model.model.layers[layer].self_attn
        hook = attention.register_forward_hook(lambda _m, _i, output: kept.append(output[0]))
        with torch.inference_mode(), apply_roles(engine.torch_model, pattern):
            engine.torch_model(tokens)
        hook.remove()
        return kept[0][0, TOPK:]

    for layer in range(1, LAYERS):
        own = attention_output(layer, Pattern.full(LAYERS))
        reused = attention_output(layer, Pattern.full(LAYERS).share(layer))  # takes layer - 1's indices
        expected = F.cosine_similarity(own, reused, dim=-1).mean().item()
        assert measured[layer, layer - 1] == pytest.approx(expected, abs=1e-5)
    assert np.all(np.diag(measured) == 1.0)
    assert np.all(np.triu(measured, 1) == 0.0)


def test_measurements_know_locked_layers() -> None:
    config = tiny_config(indexer_types=indexer_types(Pattern("FFSFFF")))
    engine, data = tiny_engine(config), random_tokens(sequences=1)
    assert engine.matrix("overlap", data, 8)[1, 2] == 1.0
    assert engine.matrix("similarity", data, 8)[2, 1] == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(PatternError, match="F for layer 2"):
        list(engine.evaluate([Pattern.full(LAYERS)], data, "nll"))


def test_loading_names_what_is_wrong(tmp_path: Any, model_folder: Any) -> None:
    with pytest.raises(FileError, match=r"config\.json: No such file"):
        TransformersEngine.load(str(tmp_path))
    with pytest.raises(SearchError, match="--dtype is int8"):
        TransformersEngine.load(str(model_folder), dtype="int8")
    with pytest.raises(SearchError, match="--device is tpu"):
        TransformersEngine.load(str(model_folder), device="tpu")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["GraniteForCausalLM"]}')
    with pytest.raises(ModelConfigError, match="GraniteForCausalLM has no attention"):
        describe_model(str(tmp_path))


def test_every_weight_comes_from_the_checkpoint(tmp_path: Path, model_folder: Path) -> None:
    """transformers makes up what is missing or misnamed, at random and with a warning."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.3.self_attn.indexer.wk.weight"

    def refusal(changed: dict[str, Tensor]) -> str:
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(SearchError) as caught:
            TransformersEngine.load(str(folder), "cpu")
        return str(caught.value)

    without = {key: value for key, value in weights.items() if key != name}
    assert f"{name} is not in the checkpoint; expected all weights of GlmMoeDsaForCausalLM" in refusal(without)
    assert f"{name} is not in the checkpoint" in refusal({**without, name.replace("wk", "key_proj"): weights[name]})
    assert "such weights)" in refusal({"lm_head.weight": weights["lm_head.weight"]})
    assert "shape" in refusal({**weights, name: torch.zeros(3, 3)})
    assert "layers.3.self_attn.indexer.wk.weight is not finite" in refusal({**weights, name: weights[name] * torch.nan})
    for cut in (100, 5000):
        (folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes()[:-cut])
        with pytest.raises(FileError, match=f"model.safetensors: is cut off, {cut} bytes are missing"):
            TransformersEngine.load(str(folder), "cpu")


def test_weights_of_locked_layers_may_be_missing(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v32", index_topk_pattern="FFSFFF")
    folder = save_model(config, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if ".layers.2.self_attn.indexer." not in key}
    assert len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    assert TransformersEngine.load(str(folder), "cpu").model.locked == (2,)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), RuntimeError("can't allocate memory: you tried")])
def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    engine = tiny_engine(tiny_config())
    monkeypatch.setattr(engine.torch_model.model, "forward", fail)
    with pytest.raises(SearchError, match="out of memory with --seq-len 40 and --batch-size 1"):
        list(engine.evaluate([Pattern.full(LAYERS)], random_tokens(), "nll"))


def test_bfloat16_loads(model_folder: Any) -> None:
    engine = TransformersEngine.load(str(model_folder), device="cpu", dtype="bfloat16")
    assert engine.settings["dtype"] == "bfloat16"
    [evaluation] = engine.evaluate([Pattern.full(LAYERS)], random_tokens(sequences=1), "nll")
    [exact] = TransformersEngine.load(str(model_folder)).evaluate([Pattern.full(LAYERS)], random_tokens(1), "nll")
    assert evaluation.losses[0] == pytest.approx(exact.losses[0], rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_agrees_with_cpu(model_folder: Any) -> None:
    data = random_tokens()
    on_cpu = {
        e.pattern.roles: e for e in TransformersEngine.load(str(model_folder), "cpu").evaluate(PATTERNS, data, "nll")
    }
    for item in TransformersEngine.load(str(model_folder), "cuda").evaluate(PATTERNS, data, "nll"):
        assert item.losses == pytest.approx(on_cpu[item.pattern.roles].losses, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_states_of_a_gpu_give_the_same_bits(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own memory, in the host's, and without a cache."""
    data, found = random_tokens(), []
    for size, there in ((0.0, "cuda"), (0.01, "cuda"), (0.01, "cpu")):
        monkeypatch.setattr(prefix, "place", lambda device, _, there=there: torch.device(there))
        engine = tiny_engine(config, prefix_cache_gb=size)
        engine.torch_model.cuda()
        found.append({item.pattern: item.losses for item in engine.evaluate(PATTERNS, data, "nll")})
        assert size == 0 or engine._cache._memory.device.type == there
    assert found[0] == found[1] == found[2]
