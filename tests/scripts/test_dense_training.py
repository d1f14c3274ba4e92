"""Dense training: windows read each token once a pass; a killed run ends the same; weights travel in pieces."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_search.errors import FolderError
from indexcache_search.workdir.lock import locked
from indexcache_train.training.processes import Processes
from scripts.bench.search import weights
from scripts.demo_model import train_dense_mla
from scripts.demo_model.dense_model import model_config, operations
from scripts.demo_model.mixture import BLOCK, Batches, Windows, mixture_of
from scripts.demo_model.train_dense_mla import DenseTrainer, Stage
from tests.scripts.small_corpus import VOCAB, write_corpus

STAGES = (Stage("128", 128, 0.3, early=True), Stage("256", 256, 0.7), Stage("decay", 256, 1.0))
TOKENS = 512  # of a step
ALONE = Processes(0, 1, torch.device("cpu"), False)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_dense_mla, "STAGES", STAGES)
    monkeypatch.setattr(train_dense_mla, "WINDOWS", 4)
    monkeypatch.setattr(DenseTrainer, "evaluate", lambda self, name, **more: None)


def trainer(corpus: Path, output: Path, seed: int = 0, longest: int = 0) -> DenseTrainer:
    config = {**model_config(2, 64, 2, VOCAB), "q_lora_rank": 32}
    return DenseTrainer(ALONE, corpus, output, seed, config, TOKENS, False, tasks=0.1, text=0.7, longest=longest)


def train(
    made: DenseTrainer, steps: list[int] | None, seconds: float = 9e9, passes: float = 3.0, base: Path | None = None
) -> None:
    made.train(steps, seconds, 0, 0.0, 1, passes, base)  # a checkpoint at every look


@pytest.mark.parametrize("length", [64, 256, BLOCK, 2 * BLOCK])
def test_windows_read_every_token_once_before_any_twice(length: int) -> None:
    tokens = 5 * BLOCK + 100
    windows, counts = Windows(tokens, 3), np.zeros(tokens, int)
    part = min(length, BLOCK)
    for place in range(0, 2 * 5 * BLOCK, part):
        start = windows.start(place)
        counts[start : start + part] += 1
        if place + part == 5 * BLOCK:
            assert set(counts.tolist()) <= {0, 1} and counts.sum() == 5 * BLOCK
    assert counts.max() == 2 and counts.sum() == 10 * BLOCK
    assert [windows.start(0), windows.start(5 * BLOCK)] == [
        Windows(tokens, 3).start(0),
        Windows(tokens, 3).start(5 * BLOCK),
    ]
    with pytest.raises(ValueError, match="expected 8192 or more"):
        Windows(BLOCK - 1, 0)


@pytest.mark.parametrize("lengths", [(64, 64), (64, 512), (512, 1024)])
def test_batches_of_any_length_go_on_where_others_stopped(tmp_path: Path, lengths: tuple[int, int]) -> None:
    """Text alone: the stream counts up, so every token says where it is from."""
    write_corpus(tmp_path)
    arrays = dict(np.load(tmp_path / "corpus.npz"))
    stream = np.arange(4 * BLOCK, dtype=np.uint16)
    np.savez(tmp_path / "corpus.npz", **{**arrays, "train": stream})
    text = {"tasks": 0.0, "mixture": mixture_of(1.0)}
    seen = []
    steps = 4 * BLOCK // 2048
    for length, numbers in zip(lengths, (range(steps // 2), range(steps // 2, steps)), strict=True):
        drawn = Batches(tmp_path, "train", length, 2048 // length, 0, **text)  # type: ignore[arg-type]
        seen += [drawn[number][0].flatten() for number in numbers]
    assert torch.cat(seen).sort().values.tolist() == stream.tolist()


def test_shares_of_the_mixture() -> None:
    assert mixture_of(0.7)["text"] == 0.7 and sum(mixture_of(0.7).values()) == pytest.approx(1.0)
    assert mixture_of(1.0)["chain"] == 0.0


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_killed_anywhere_it_ends_with_the_same_weights(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in a stage, between stages, and while a checkpoint or the model gets its name."""
    monkeypatch.setattr(train_dense_mla, "CHECK", 1)
    steps = [3, 2, 2]
    train(trainer(corpus, tmp_path / "whole"), steps)
    replace = Path.replace
    for deadly in (2, 5, 3, 1, 2, 3):
        left = [deadly]

        def dying(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", dying)
        with suppress(KeyboardInterrupt):
            train(trainer(corpus, tmp_path / "killed"), steps)
        monkeypatch.setattr(Path, "replace", replace)
        assert not (tmp_path / "killed" / "model.safetensors").exists() or left[0] > 0
    train(trainer(corpus, tmp_path / "killed"), steps)
    whole, killed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "killed")
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    log = [json.loads(line) for line in (tmp_path / "killed" / "train_log.jsonl").read_text().splitlines()]
    last = [item for item in log if "text_losses" in item][-1]
    assert last["passes"] == pytest.approx(7 * TOKENS / 40_000, abs=1e-3)
    assert set(last["text_losses"]) == {"train", "evaluation"}


def test_no_token_is_read_more_often_than_said(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_dense_mla, "CHECK", 1)
    by_clock = trainer(corpus, tmp_path / "clock")
    train(by_clock, None, seconds=1e6, passes=0.3)
    assert by_clock.step == int(0.3 * 40_000 / TOKENS)
    assert by_clock.ends[-1] == by_clock.step and by_clock.ends[0] in (7, 8)
    with pytest.raises(SystemExit, match=r"--steps takes 300 steps, expected 234 at most: 3\.0 passes"):
        train(trainer(corpus, tmp_path / "steps"), [100, 100, 100])


def test_the_last_stage_is_as_long_as_the_time_that_is_left(corpus: Path, tmp_path: Path) -> None:
    """Its sequences are longer than those of the stage before, and each of their tokens takes longer."""
    made = trainer(corpus, tmp_path, longest=512)
    assert [stage.length for stage in made.stages] == [128, 256, 512]
    made.ends, made.spent, made.step, made.most = [0, 10, None], [0.0, 20.0, 0.0], 10, None
    slower = operations(made.config, 512) / operations(made.config, 256)
    assert 1.0 < slower < 2.0
    assert made._last_end(20.0 + 100.0) == 10 + round(100.0 / (2.0 * slower))


def test_operations_are_two_a_weight_and_twice_as_many_backward() -> None:
    config = model_config(3, 64, 2, VOCAB)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    read = [item.numel() for name, item in model.named_parameters() if item.dim() > 1 and "embed" not in name]
    assert operations(config, 0) == 6 * sum(read)
    heads = 3 * 2 * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"])
    assert operations(config, 1000) - operations(config, 0) == 6 * heads * 500


def test_another_runs_checkpoint_is_refused(corpus: Path, tmp_path: Path) -> None:
    train(trainer(corpus, tmp_path / "a"), [1, 1, 1])
    with pytest.raises(SystemExit, match=r"checkpoint\.pt: seed is 0, expected 1; take another --output"):
        train(trainer(corpus, tmp_path / "a", seed=1), [1, 1, 1])


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.0), ("int8", 0.005)])
def test_weights_travel_in_pieces(corpus: Path, tmp_path: Path, dtype: str, error: float) -> None:
    """Of a model that is done; after `join` it loads, and is the same within the rounding."""
    train(trainer(corpus, tmp_path / "model"), [1, 1, 1])
    paths = weights.write_pieces(tmp_path / "model", tmp_path / "pieces", dtype, piece=50_000)
    assert len(paths) > 3 and max(path.stat().st_size for path in paths) <= 50_000
    weights.join([tmp_path / "pieces"], tmp_path / "joined")
    before, after = weights_of(tmp_path / "model"), weights_of(tmp_path / "joined")
    assert before.keys() == after.keys() and {item.dtype for item in after.values()} == {torch.bfloat16}
    for name, item in before.items():
        far = (item.float() - after[name].float()).abs().max()
        assert far <= error * item.float().abs().max() + 0.004 * (error > 0) * item.float().abs().max()
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    assert all((tmp_path / "joined" / name).read_bytes() == (tmp_path / "model" / name).read_bytes() for name in names)


def test_lost_and_damaged_pieces_are_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    train(trainer(corpus, tmp_path / "model"), [1, 1, 1])
    with pytest.raises(SystemExit, match=r"corpus\d*: has neither model\.safetensors nor checkpoint\.pt"):
        weights.write_pieces(corpus, tmp_path / "none", "bf16")
    first, second, *_ = weights.write_pieces(tmp_path / "model", tmp_path / "pieces", "int8", piece=50_000)
    with pytest.raises(SystemExit, match="has files, expected an empty folder"):
        weights.write_pieces(tmp_path / "model", tmp_path / "pieces", "int8")
    with locked(tmp_path / "pieces", "another"), pytest.raises(FolderError, match="another is using"):
        weights.write_pieces(tmp_path / "model", tmp_path / "pieces", "int8")
    good = second.read_bytes()
    second.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(SystemExit, match=r"weights-001: 50000 bytes of sha256 .*, expected 50000 of"):
        weights.join([tmp_path / "pieces"], tmp_path / "joined")
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match="missing: weights-001; expected all"):
        weights.join([tmp_path / "pieces"], tmp_path / "joined")
    assert not (tmp_path / "joined" / "model.safetensors").exists()
    second.write_bytes(good)
    manifest = tmp_path / "pieces" / "pieces.json"
    manifest.write_text(manifest.read_text().replace("weights/v1", "weights/v2"))
    with pytest.raises(SystemExit, match=r"pieces\.json: schema is indexcache-weights/v2, expected"):
        weights.join([tmp_path / "pieces"], tmp_path / "joined")
    assert first.exists()


def test_another_session_goes_on_from_carried_weights(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights, the step, and so the text that was not read yet; optimizers begin anew, over a ramp."""
    steps = [3, 2, 2]
    keep, kept = DenseTrainer.keep, [0]

    def dying(self: DenseTrainer) -> None:
        keep(self)
        kept[0] += 1
        if kept[0] == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(DenseTrainer, "keep", dying)
    with pytest.raises(KeyboardInterrupt):
        train(trainer(corpus, tmp_path / "first"), steps)
    monkeypatch.setattr(DenseTrainer, "keep", keep)
    weights.write_pieces(tmp_path / "first", tmp_path / "pieces", "bf16")
    weights.join([tmp_path / "pieces"], tmp_path / "base")
    second = trainer(corpus, tmp_path / "second")
    train(second, steps, base=tmp_path / "base")
    assert (second.step, second.since) == (7, 5)
    lines = (tmp_path / "second" / "train_log.jsonl").read_text().splitlines()
    assert [item["step"] for item in map(json.loads, lines) if "step" in item] == [6, 7]
    with pytest.raises(SystemExit, match=r"progress\.json: seed is 0, expected 1"):
        train(trainer(corpus, tmp_path / "third", seed=1), steps, base=tmp_path / "base")


def test_a_finished_model_is_loaded_by_distillation(corpus: Path, tmp_path: Path) -> None:
    from indexcache_train.distill.dense_mla import DenseStart
    from indexcache_train.distill.settings import IndexerSize

    train(trainer(corpus, tmp_path / "model"), [1, 1, 1])
    start = DenseStart.read(str(tmp_path / "model"), IndexerSize(heads=2, dim=64, topk=16))
    assert start is not None and start.config["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert start.description.num_layers == 2
    assert start.config["index_topk"] == 16
