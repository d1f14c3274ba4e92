"""indexcache-distill on dense models with latent attention: what they become, and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from extras.train.tests.distilling import PATTERN, arguments, distill, in_two_processes, records, train_alike
from indexcache_train.cli import app
from indexcache_train.distill import conversion, memory, run
from indexcache_train.distill.dense_mla import DenseStart
from indexcache_train.distill.settings import DistillSettings, IndexerSize
from sglang_indexcache import Pattern
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.io.messages import MODEL_CHANGED
from sglang_indexcache.pattern_file.file import PatternFile
from tests.conftest import LAYERS, MLA, TOPK, VOCAB, save_model, tiny_mla_config
from tests.forked import forked, killed_at

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("no_pictures")]
SIZE = {"index_heads": 32, "index_dim": 16, "index_topk": TOPK}
LENGTH = 40
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale_all_dim": 1,
}


def converted(model: Path, folder: Path, pattern: str = "F" * LAYERS, topk: int = LENGTH, seed: int = 0) -> Path:
    start = DenseStart.read(str(model), IndexerSize(heads=32, dim=16, topk=topk))
    assert start is not None
    folder.mkdir()
    conversion.convert(model, start.made_for(Pattern(pattern)), seed, folder)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: item for path in folder.glob("*.safetensors") for name, item in load_file(path).items()}


def logprobs(folder: Path) -> Tensor:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits.log_softmax(-1)


@pytest.fixture(scope="session", params=list(MLA))
def mla_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random dense model of each architecture."""
    return save_model(tiny_mla_config(request.param, initializer_range=0.1), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def glm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_mla_config("glm4_moe_lite"), tmp_path_factory.mktemp("glm4-moe-lite"))


@pytest.fixture(scope="session")
def deepseek_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tiny_mla_config("deepseek_v3"), tmp_path_factory.mktemp("deepseek-v3"))


@pytest.fixture(scope="session")
def trained_glm(glm_folder: Path, training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run from a dense model."""
    output = tmp_path_factory.mktemp("trained-glm") / "out"
    code, text = distill(glm_folder, training, output, **SIZE)
    assert code == 0, text
    return output


def test_while_all_is_selected_it_is_the_dense_model(mla_folder: Path, tmp_path: Path) -> None:
    found = logprobs(converted(mla_folder, tmp_path / "dsa"))
    torch.testing.assert_close(found, logprobs(mla_folder), rtol=0, atol=1e-5)
    fewer = logprobs(converted(mla_folder, tmp_path / "sparse", topk=4))
    assert (fewer - found).abs().max() > 1e-2  # what is not selected counts


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe_lite"])
def test_rotary_embeddings_for_long_contexts_stay(model_type: str, tmp_path: Path) -> None:
    model = save_model(tiny_mla_config(model_type, rope_parameters=YARN, initializer_range=0.1), tmp_path / "model")
    torch.testing.assert_close(logprobs(converted(model, tmp_path / "dsa")), logprobs(model), rtol=0, atol=1e-5)


def test_keys_that_are_not_written_are_the_dense_models_own(tmp_path: Path) -> None:
    """The defaults of both architectures differ."""
    config = tiny_mla_config("glm4_moe_lite", initializer_range=0.1)
    for key in ("mlp_layer_types", "rms_norm_eps", "rope_parameters"):
        del config[key]
    model = save_model(config, tmp_path / "model")
    torch.testing.assert_close(logprobs(converted(model, tmp_path / "dsa")), logprobs(model), rtol=0, atol=1e-5)
    written = json.loads((tmp_path / "dsa" / "config.json").read_text())
    assert written["first_k_dense_replace"] == 1 and written["rms_norm_eps"] == 1e-5


def test_indexers_of_f_layers_alone(glm_folder: Path, deepseek_folder: Path, tmp_path: Path) -> None:
    every = tensors(converted(glm_folder, tmp_path / "all"))
    some = tensors(converted(glm_folder, tmp_path / "some", PATTERN))
    assert Checkpoint.read(str(tmp_path / "some")).indexer_layers == {0, 3}
    assert all(torch.equal(item, every[name]) for name, item in some.items()) and len(every) - len(some) == 4 * 5
    converted(deepseek_folder, tmp_path / "deepseek", PATTERN)
    assert Checkpoint.read(str(tmp_path / "deepseek")).indexer_layers == set(range(LAYERS))
    other = tensors(converted(glm_folder, tmp_path / "other", seed=1))
    name = "model.layers.0.self_attn.indexer.wk.weight"
    assert not torch.equal(other[name], every[name]) and torch.equal(other["lm_head.weight"], every["lm_head.weight"])
    matrix = every["model.layers.0.self_attn.indexer.wq_b.weight"]
    assert matrix.shape == (32 * 16, 24) and matrix.std().item() == pytest.approx(0.2, rel=0.05)


def test_shards_and_nextn_layers(deepseek_folder: Path, tmp_path: Path) -> None:
    """NextN layers have no indexer, which SGLang would look for; files without them are copied as they are."""
    model = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(deepseek_folder).save_pretrained(model, max_shard_size="200KB")
    config = {**tiny_mla_config("deepseek_v3"), "num_nextn_predict_layers": 1, "auto_map": {"AutoConfig": "of.Another"}}
    (model / "config.json").write_text(json.dumps(config))
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first, *_, last = sorted(set(index["weight_map"].values()))
    extra = {"model.layers.6.eh_proj.weight": torch.ones(2, 3)}
    save_file({**load_file(model / last), **extra}, model / last, metadata={"format": "pt"})
    path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], **dict.fromkeys(extra, last)}}))
    (model / "tokenizer.json").write_text("{}")
    found = converted(model, tmp_path / "dsa")
    assert (found / first).read_bytes() == (model / first).read_bytes()
    assert not any("layers.6." in name for name in tensors(found)) and (found / "tokenizer.json").exists()
    written = json.loads((found / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 0 and "auto_map" not in written
    torch.testing.assert_close(logprobs(found), logprobs(deepseek_folder), rtol=0, atol=1e-5)


def test_a_run(trained_glm: Path, glm_folder: Path) -> None:
    """Its first row is the dense model."""
    log = records(trained_glm)
    evaluations = [(line["stage"], line["step"]) for line in log if "losses" in line]
    assert evaluations == [("original", 0), ("warmup", 2), ("sparse", 4), ("sparse", 6)]
    metrics = json.loads((trained_glm / "metrics.json").read_text())
    assert [row["pattern"] for row in metrics["rows"]] == ["D" * LAYERS, *[PATTERN] * 3]
    before, after = tensors(trained_glm / "work" / "converted"), tensors(trained_glm / "model")
    assert all("indexer." in name for name in before.keys() - tensors(glm_folder).keys())
    trained = [name for name in after if "indexer." in name and not torch.equal(after[name], before[name])]
    assert len(trained) == 2 * 5


def test_the_row_of_the_dense_model(trained_glm: Path, glm_folder: Path) -> None:
    from indexcache_train.training.stored import load_set

    held_out = load_set(trained_glm / "work" / "data" / "held-out")
    assert held_out is not None
    tokens = torch.from_numpy(held_out.tokens.astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(glm_folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    expected = (losses * torch.from_numpy(held_out.scored[:, 1:].copy())).sum(1)
    found = torch.tensor(records(trained_glm)[0]["losses"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_result_is_a_dsa_checkpoint(trained_glm: Path) -> None:
    file = PatternFile.load(str(trained_glm / "pattern.yaml"))
    assert file.pattern == PATTERN and file.model.architecture == "GlmMoeDsaForCausalLM"
    assert Checkpoint.read(str(trained_glm / "model")).misfits(file.as_pattern(), file) == []
    model, report = AutoModelForCausalLM.from_pretrained(trained_glm / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert [layer.self_attn.indexer is None for layer in model.model.layers] == [letter == "S" for letter in PATTERN]


def test_s_layers_of_deepseek_have_their_sources_indexers(
    deepseek_folder: Path, training: Path, tmp_path: Path
) -> None:
    """transformers runs the indexers of all layers, and those of S layers did not train."""
    code, text = distill(deepseek_folder, training, tmp_path / "out", **SIZE, warmup_steps=1, steps=1)
    assert code == 0, text
    found = tensors(tmp_path / "out" / "model")
    for layer, source in enumerate(Pattern(PATTERN).source_layers):
        for name in ("wk.weight", "wq_b.weight", "k_norm.bias", "weights_proj.weight"):
            own, its = (found[f"model.layers.{number}.self_attn.indexer.{name}"] for number in (layer, source))
            assert torch.equal(own, its)
    logprobs(tmp_path / "out" / "model")
    file = PatternFile.load(str(tmp_path / "out" / "pattern.yaml"))
    assert Checkpoint.read(str(tmp_path / "out" / "model")).misfits(file.as_pattern(), file) == []


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("deepseek_v2", {"q_lora_rank": None}, "q_lora_rank is None, expected a number"),
        ("deepseek_v2", {"first_k_dense_replace": 2}, "chosen by softmax without a correction bias"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2, expected 1"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False, expected True"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("glm4_moe_lite", {"index_topk": 8}, "index_topk is 8, so it has indexers"),
        ("deepseek_v3", {"sliding_window": 8}, "sliding_window is 8, which may change attention"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
        ("deepseek_v3", {"attention_dropout": 0.5}, "attention_dropout is 0.5, expected 0"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"]},
            "mlp_layer_types has layers without experts behind layer 1, expected them first",
        ),
    ],
)
def test_models_that_dsa_has_no_place_for(
    model_type: str, changes: dict[str, Any], message: str, training: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_mla_config(model_type, **changes)))
    code, text = distill(model, training, tmp_path / "out", **SIZE)
    assert code == 2 and message in " ".join(text.split()) and len(text.strip().splitlines()) == 1, text
    assert not (tmp_path / "out").exists()


def test_sizes_of_indexers(glm_folder: Path, model_folder: Path, training: Path, tmp_path: Path) -> None:
    code, text = distill(glm_folder, training, tmp_path / "out", index_dim=4)
    assert code == 2 and "--index-dim is 4, expected at least 8, the qk_rope_head_dim of" in text
    code, text = distill(model_folder, training, tmp_path / "out", index_topk=16)
    assert code == 2 and "--index-topk needs a dense model with MLA" in text
    code, text = distill(glm_folder, training, tmp_path / "out", seq_len=8, **SIZE)
    assert code == 2 and "index_topk is 8" in text


def test_missing_weights_are_refused(glm_folder: Path, training: Path, tmp_path: Path) -> None:
    model = shutil.copytree(glm_folder, tmp_path / "model")
    (model / "model.safetensors").unlink()
    code, text = distill(model, training, tmp_path / "out", **SIZE)
    assert code == 2 and "has no weights in safetensors" in text
    weights = tensors(glm_folder)
    del weights["model.layers.3.self_attn.o_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    code, text = distill(model, training, tmp_path / "other", **SIZE)
    assert code == 2 and "model.layers.3.self_attn.o_proj.weight is not in the checkpoint" in " ".join(text.split())
    weights |= {"model.layers.0.self_attn.q_a_proj.weight": torch.zeros(24, 48, dtype=torch.int64)}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    code, text = distill(model, training, tmp_path / "third", **SIZE)
    assert code == 2 and "is torch.int64, expected it in bfloat16 or float32" in " ".join(text.split())


def test_another_size_in_the_same_folder_is_another_run(trained_glm: Path, glm_folder: Path, training: Path) -> None:
    code, text = distill(glm_folder, training, trained_glm, **{**SIZE, "index_heads": 16})
    assert code == 2 and "belongs to a run with" in text


def test_a_conversion_that_was_cut_off(
    trained_glm: Path, glm_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left is discarded, and the run is the same."""
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "indexers", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert distill(glm_folder, training, tmp_path / "out", **SIZE)[0] == 130
    assert not (tmp_path / "out" / "work" / "converted").exists()
    code, text = distill(glm_folder, training, tmp_path / "out", **SIZE)
    assert code == 0, text
    assert records(tmp_path / "out") == records(trained_glm)
    ours, theirs = tensors(tmp_path / "out" / "model"), tensors(trained_glm / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_model_that_changes_while_it_is_converted(
    glm_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, convert = shutil.copytree(glm_folder, tmp_path / "model"), conversion.convert

    def change(*given: Any) -> None:
        convert(*given)
        (model / "model.safetensors").write_bytes(b"other")

    monkeypatch.setattr(run, "convert", change)
    code, text = distill(model, training, tmp_path / "out", **SIZE)
    assert code == 2 and f"model.safetensors: {MODEL_CHANGED}" in " ".join(text.split())
    assert not (tmp_path / "out" / "work" / "converted").exists()


def test_a_loss_that_is_not_finite_ends_the_run(
    glm_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DistillSettings, "rate", lambda *_: 1e18)
    code, text = distill(glm_folder, training, tmp_path / "out", **SIZE, checkpoint_every=1, steps=20, max_norm=1e6)
    assert code == 1 and "expected finite numbers; the last good checkpoint is" in " ".join(text.split())
    assert not (tmp_path / "out" / "model").exists()


def test_too_little_memory_is_refused_before_anything_is_written(
    glm_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda *_: 100_000)
    code, text = distill(glm_folder, training, tmp_path / "out", **SIZE)
    assert code == 2 and "GB are needed in each process" in text and not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [{}, {"search_first": "1/2", "write": "tensorboard=yes"}])
def test_what_is_read_of_the_data_is_shown(
    glm_folder: Path, training: Path, tmp_path: Path, more: dict[str, str]
) -> None:
    code, text = distill(glm_folder, training, tmp_path / "out", **{**SIZE, **more}, dry_run=True)
    assert code == 0 and "training" in text and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_train_as_one_does(trained_glm: Path, glm_folder: Path, training: Path, tmp_path: Path) -> None:
    """The first one converts the model."""
    words = arguments(glm_folder, training, tmp_path / "out", **SIZE)
    in_two_processes(words, tmp_path / "log")
    train_alike(trained_glm, tmp_path / "out", 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 3, 6])
def test_a_killed_run_goes_on_to_the_same_losses(
    trained_glm: Path, glm_folder: Path, training: Path, tmp_path: Path, lines: int
) -> None:
    process = forked("indexcache_train", arguments(glm_folder, training, tmp_path / "out", **SIZE))
    killed_at(process, tmp_path / "out" / "log.jsonl", lines)
    assert process.exitcode == -signal.SIGKILL
    code, text = distill(glm_folder, training, tmp_path / "out", **SIZE)
    assert code == 0, text
    assert records(tmp_path / "out") == records(trained_glm)
    ours, theirs = tensors(tmp_path / "out" / "model"), tensors(trained_glm / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# -- a search first

SIZES = {**SIZE, "seq_len": 24, "batch_size": 2, "num_sequences": 4}


@pytest.fixture(scope="session")
def searched(glm_folder: Path, training: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run from a dense model, with a search."""
    output = tmp_path_factory.mktemp("searched") / "out"
    code, text = distill(glm_folder, training, output, **SIZES, search_first="1/3")
    assert code == 0, text
    return output


def test_a_search_first(searched: Path) -> None:
    """Indexers in all layers train, then the pattern is found on them, then it is trained for."""
    found = PatternFile.load(str(searched / "search" / "pattern.yaml"))
    first = json.loads((searched / "all-layers" / "metrics.json").read_text())
    assert [row["pattern"] for row in first["rows"]] == ["D" * LAYERS, *["F" * LAYERS] * 3]
    assert Checkpoint.read(str(searched / "all-layers" / "model")).indexer_layers == set(range(LAYERS))
    assert len(found.as_pattern().full_layers) == 2 and found.search is not None
    file = PatternFile.load(str(searched / "trained" / "pattern.yaml"))
    assert file.pattern == found.pattern
    assert Checkpoint.read(str(searched / "trained" / "model")).indexer_layers == set(found.as_pattern().full_layers)
    last = json.loads((searched / "trained" / "metrics.json").read_text())
    assert [row["pattern"] for row in last["rows"]] == ["F" * LAYERS, *[found.pattern] * 4]
    logprobs(searched / "trained" / "model")


def test_a_search_first_of_a_model_with_indexers(model_folder: Path, training: Path, tmp_path: Path) -> None:
    few = {"seq_len": 24, "batch_size": 2, "num_sequences": 4, "warmup_steps": 1, "steps": 1}
    code, text = distill(model_folder, training, tmp_path / "out", **few, search_first="1/3")
    assert code == 0, text
    assert not (tmp_path / "out" / "all-layers").exists()
    found = PatternFile.load(str(tmp_path / "out" / "search" / "pattern.yaml"))
    assert PatternFile.load(str(tmp_path / "out" / "trained" / "pattern.yaml")).pattern == found.pattern


@pytest.mark.parametrize("phase", ["all-layers/metrics.json", "search/pattern.yaml", "trained/metrics.json"])
def test_a_search_first_that_was_cut_off(
    searched: Path, glm_folder: Path, training: Path, tmp_path: Path, phase: str
) -> None:
    """As killed before a phase's results were written: the rest is the same."""
    output = shutil.copytree(searched, tmp_path / "out")
    (output / phase).unlink()
    if phase.startswith("all-layers"):
        shutil.rmtree(output / "all-layers" / "model")
        shutil.rmtree(output / "search")
    if not phase.startswith("search"):
        shutil.rmtree(output / "trained" / "model")
    code, text = distill(glm_folder, training, output, **SIZES, search_first="1/3")
    assert code == 0, text
    for folder in (Path("trained"), Path("all-layers")):
        assert records(output / folder) == records(searched / folder)
        ours, theirs = (tensors(place / folder / "model") for place in (output, searched))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    name = "search/pattern.yaml"
    assert PatternFile.load(str(output / name)).pattern == PatternFile.load(str(searched / name)).pattern


def test_what_a_search_first_refuses(
    glm_folder: Path, model_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written."""
    code, text = distill(glm_folder, training, tmp_path / "out", **SIZES, search_first="2")
    assert code == 2 and "retention is 2, expected more than 0 and at most 1" in " ".join(text.split())
    words = [*arguments(glm_folder, training, tmp_path / "out", **SIZES), "--search-first", "1/3"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "--pattern needs a run without --search-first" in result.output
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        code, text = distill(glm_folder, training, tmp_path / "out", **SIZES, search_first="1/3")
        assert code == 2 and "--search-first searches in one process, found 2" in " ".join(text.split())
    monkeypatch.setattr(memory, "available", lambda *_: 100_000)
    for model, sizes in ((glm_folder, SIZES), (model_folder, {})):
        code, text = distill(model, training, tmp_path / "out", **sizes, search_first="1/3")
        assert code == 2 and "GB are needed in each process" in text, text
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "lines"), [("all-layers/log.jsonl", 4), ("search/work/journal.jsonl", 6), ("trained/log.jsonl", 5)]
)
def test_a_killed_search_first_goes_on_to_the_same(
    searched: Path, glm_folder: Path, training: Path, tmp_path: Path, file: str, lines: int
) -> None:
    words = arguments(glm_folder, training, tmp_path / "out", **SIZES, search_first="1/3")
    process = forked("indexcache_train", words)
    killed_at(process, tmp_path / "out" / file, lines)
    assert process.exitcode == -signal.SIGKILL
    code, text = distill(glm_folder, training, tmp_path / "out", **SIZES, search_first="1/3")
    assert code == 0, text
    output, whole = tmp_path / "out" / "trained", searched / "trained"
    assert records(output) == records(whole)
    ours, theirs = tensors(output / "model"), tensors(whole / "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
