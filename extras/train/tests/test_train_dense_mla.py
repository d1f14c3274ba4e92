"""The training of a dense model with MLA: what it computes, and that kills, NaN and small devices lose nothing."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from indexcache_train.training.processes import Processes
from scripts.demo_model import dense_model, glm, mixture, train_dense_mla
from scripts.demo_model.dense_model import check_memory, model_config
from scripts.demo_model.mixture import TASK, Batches
from scripts.demo_model.recall import ANSWER, TEXT, UNSCORED
from scripts.demo_model.train_dense_mla import DenseTrainer, Stage
from tests.scripts.small_corpus import VOCAB, write_corpus
from tests.two_ranks import on_two_ranks

ALONE = Processes(0, 1, torch.device("cpu"), False)
STEPS = [2, 2, 3]
LISTED = train_dense_mla.STAGES


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = (Stage("short", 96, 0.25, early=True), Stage("long", 130, 0.75), Stage("decay", 130, 1.0))
    monkeypatch.setattr(train_dense_mla, "STAGES", stages)
    monkeypatch.setattr(train_dense_mla, "CHECK", 1)
    monkeypatch.setattr(DenseTrainer, "evaluate", lambda self, name, sparse, sequences, length: None)


def make(corpus: Path, output: Path, seed: int = 0) -> DenseTrainer:
    return DenseTrainer(ALONE, corpus, output, seed, model_config(2, 64, 2, VOCAB), 260, False)


def train(trainer: DenseTrainer, steps: list[int] | None = STEPS, seconds: float = 0.0) -> dict[str, torch.Tensor]:
    trainer.train(steps, seconds, workers=0, keep_every=0.0, show=1)
    return {name: item.float() for name, item in trainer.model.state_dict().items()}


@torch.no_grad()
def test_dense_passes_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    config = {**model_config(2, 64, 2, VOCAB), "initializer_range": 0.1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
    tokens = torch.randint(3, VOCAB, (2, 50))
    x, rope = glm.embed(model, tokens), glm.positions(model, 50, tokens.device)
    for layer in model.model.layers:
        x = glm.dense_layer(layer, x, rope)
    torch.testing.assert_close(
        model.lm_head(glm.final(model, x)), model(input_ids=tokens, use_cache=False).logits, atol=1e-4, rtol=1e-4
    )


def test_the_model_has_sixty_million_weights() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model_config(16, 512, 8, 8192)))
    assert sum(item.numel() for item in model.parameters()) > 60e6


def test_a_killed_training_goes_on_to_the_same_weights(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(make(corpus, tmp_path / "whole"))
    for killed in (1, 3, 6):  # in each stage
        trainer, step = make(corpus, tmp_path / f"killed-{killed}"), DenseTrainer.dense_step

        def stop(self: DenseTrainer, *words: Any, killed: int = killed, step: Any = step) -> Any:
            if self.step == killed:
                raise KeyboardInterrupt
            return step(self, *words)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(DenseTrainer, "dense_step", stop)
            train(trainer)
        again = make(corpus, tmp_path / f"killed-{killed}")
        found = train(again)
        assert again.step == sum(STEPS) and all(torch.equal(whole[name], found[name]) for name in whole)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "train_log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[:-1]] == list(range(1, 8))
    assert lines[-1]["text_losses"].keys() == {"train", "evaluation"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole").config.model_type == "glm4_moe_lite"


def test_the_clock_ends_stages_and_the_last_one_has_a_known_end(corpus: Path, tmp_path: Path) -> None:
    trainer = make(corpus, tmp_path)
    train(trainer, None, 0.0)
    assert trainer.ends == [1, 2, 3] and all(seconds > 0 for seconds in trainer.spent)
    assert trainer.optimizers[0].param_groups[0]["lr"] == train_dense_mla.RATE  # one step: the whole fall is behind it
    again = make(corpus, tmp_path)
    train(again, None, 0.0)
    assert again.step == 3  # nothing is left to do


def test_a_stage_of_short_sequences_ends_once_answers_are_found(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = itertools.chain([0.1, 3.0, 0.3, 0.2], itertools.repeat(0.1))
    step = DenseTrainer.dense_step

    def told(self: DenseTrainer, *words: Any) -> Any:
        step(self, *words)
        answer = next(losses)
        return lambda: {"answer": answer}

    monkeypatch.setattr(DenseTrainer, "dense_step", told)
    monkeypatch.setattr(train_dense_mla, "LOOKS", 2)
    trainer, clock = make(corpus, tmp_path), iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    train(trainer, None, 80.0)
    assert trainer.ends[0] == 4 and trainer.spent[1] > trainer.spent[0]  # two looks in a row


def test_all_lengths_of_a_training_have_room_for_their_tasks() -> None:
    lengths = {stage.length for stage in LISTED}
    assert lengths - {256} == {512, 1024, 4096} and mixture.SHORTEST == 512
    shares = [stage.until for stage in LISTED]
    assert shares == sorted(shares) and shares[-1] == 1.0 and not any(stage.early for stage in LISTED[-2:])


def test_the_rate_falls_to_zero_over_the_last_stage(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    step = DenseTrainer.dense_step

    def seen(self: DenseTrainer, *words: Any) -> Any:
        rates.append(self.optimizers[1].param_groups[0]["lr"] / train_dense_mla.RATE)
        return step(self, *words)

    monkeypatch.setattr(DenseTrainer, "dense_step", seen)
    monkeypatch.setattr(train_dense_mla, "RAMP", 2)
    train(make(corpus, tmp_path))
    assert rates == pytest.approx([0.5, 1, 0.5, 1, 1, 2 / 3, 1 / 3])


def test_nan_ends_before_the_step(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, step = make(corpus, tmp_path), DenseTrainer.dense_step

    def broken(self: DenseTrainer, *words: Any) -> Any:
        metrics = step(self, *words)
        if self.step == 3:
            next(self.model.parameters()).grad[0, 0] = float("nan")
        return metrics

    monkeypatch.setattr(DenseTrainer, "dense_step", broken)
    with pytest.raises(SystemExit, match=r"long, step 4: gradient norm nan, expected a number; the last good .*\.pt"):
        train(trainer)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["step"] == 3
    assert all(torch.equal(item, kept["model"][name]) for name, item in trainer.model.state_dict().items())


def test_missing_memory_is_said_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_config(16, 512, 8, 8192)
    monkeypatch.setattr(dense_model, "available", lambda device: int(60e9))
    assert 10 < check_memory(config, 65536, torch.device("cpu")) < 60
    monkeypatch.setattr(dense_model, "available", lambda device: int(6e9))
    with pytest.raises(SystemExit, match=r"about .* GB are needed, cpu has 6.0 free; expected fewer --batch-tokens"):
        check_memory(config, 65536, torch.device("cpu"))


def test_the_folder_of_another_training_is_refused(corpus: Path, tmp_path: Path) -> None:
    train(make(corpus, tmp_path), [1, 1, 1])
    with pytest.raises(SystemExit, match=r"checkpoint\.pt: seed is 0, expected 1; take another --output"):
        train(make(corpus, tmp_path, seed=1))


def test_a_batch_depends_on_its_number_alone(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "TASK_NAMES", ("multi_key", "variable_tracking"))
    batches = Batches(corpus, "train", 1500, 4, seed=0)
    tokens, kind = batches[5]
    assert tokens.shape == kind.shape == (4, 1500) and tokens.dtype == torch.int64
    assert [(row == TASK).any().item() for row in kind] == [False, False, True, True]
    assert ((kind[2:] == TASK) | (kind[2:] == TEXT)).all()
    assert torch.equal(mixture.scored(kind)[:2].bool(), kind[:2] != UNSCORED)
    assert torch.equal(mixture.scored(kind)[2:].bool(), kind[2:] == TASK)
    batches[6]
    assert all(torch.equal(one, two) for one, two in zip((tokens, kind), batches[5], strict=True))
    for other in (batches[6], Batches(corpus, "train", 1500, 4, 1)[5], Batches(corpus, "evaluation", 1500, 4, 0)[5]):
        assert not torch.equal(tokens, other[0])
    assert not (Batches(corpus, "train", 200, 4, seed=0)[5][1] == TASK).any()  # too short for such samples


def test_records_of_short_sequences_are_of_few_words(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "FEW", 4)
    for length, words in ((200, 4), (1500, 64)):
        tokens, kind = Batches(corpus, "train", length, 16, 0, tasks=0.0, mixture={"kv_dense": 1.0})[0]
        assert set(tokens[kind == ANSWER].tolist()) == set(range(164 - words, 164))


def averaged(rank: int) -> torch.Tensor:
    """Average gradients that differ by rank."""
    trainer = DenseTrainer.__new__(DenseTrainer)
    trainer.processes = Processes(rank, 2, torch.device("cpu"), False)
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 10.0 * number + rank)
    trainer._average(parameters)
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


def ended(rank: int) -> int:
    """Plan the last stage where the clocks of ranks differ."""
    trainer = DenseTrainer.__new__(DenseTrainer)
    trainer.processes = Processes(rank, 2, torch.device("cpu"), False)
    trainer.most = None
    trainer.step, trainer.ends, trainer.spent = 6, [2, 6, None], [10.0, 10.0 + 30 * rank, 0.0]
    return trainer._last_end(100.0)


@pytest.mark.slow
def test_processes_whose_clocks_differ_end_at_the_same_step(tmp_path: Path) -> None:
    assert on_two_ranks(ended, tmp_path) == [6 + 32] * 2  # 80 s are left, at 2.5 s a step


def test_two_processes_step_alike(tmp_path: Path) -> None:
    expected = torch.tensor([0.5] * 6 + [10.5] * 4)
    assert all(torch.equal(found, expected) for found in on_two_ranks(averaged, tmp_path))
