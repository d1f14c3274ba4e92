"""The loss of indexers in Hugging Face's Trainer: its definition, packed, padded, over two ranks, and in a training."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from indexcache_kernels.transformers import INDEXER_ROPES
from indexcache_search.errors import NonFiniteLossError, SearchError
from indexcache_train.distill.adapters.huggingface import IndexerLoss, parameter_groups
from indexcache_train.distill.losses import multi_layer
from indexcache_train.distill.model import Distillation
from indexcache_train.distill.settings import Stage
from sglang_indexcache import Pattern
from sglang_indexcache.families.dsa.transformers import attentions as dsa_attentions
from tests.conftest import LAYERS, VOCAB, tiny_config, tiny_model
from tests.two_ranks import on_two_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
PATTERN, LENGTHS = Pattern("FSSFSS"), (10, 14)
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
STAGES: tuple[Stage, ...] = ("warmup", "sparse")


def model_of(model_type: str = "glm_moe_dsa") -> Any:
    """In float64, without experts, whose choice would differ by rounding."""
    return tiny_model(tiny_config(model_type, first_k_dense_replace=LAYERS)).double().train()


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]


def packed() -> dict[str, Tensor]:
    labels = [torch.cat([torch.tensor([-100]), row[1:]]) for row in rows()]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {"input_ids": torch.cat(rows())[None], "position_ids": positions[None], "labels": torch.cat(labels)[None]}


def padded(side: str) -> dict[str, Tensor]:
    ids, mask = torch.zeros(2, 14, dtype=torch.int64), torch.zeros(2, 14, dtype=torch.int64)
    for line, row in enumerate(rows()):
        place = slice(14 - len(row), 14) if side == "left" else slice(len(row))
        ids[line, place], mask[line, place] = row, 1
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "labels": ids.where((mask > 0) & (positions > 0), -100),
    }


def by_definition(model: Any, stage: Stage) -> dict[str, Tensor]:
    """Gradients of the mean of Equation 1, from whole rows of both distributions, a sequence after the other."""

    class Watched(Distillation):
        def _divergence(self, layer: int, p: Tensor) -> Tensor:
            targets.setdefault(self.pattern.source_layers[layer], []).append(p)
            log_q[self.pattern.source_layers[layer]] = self._log_q[self.pattern.source_layers[layer]]
            return super()._divergence(layer, p)

    model.zero_grad()
    for row in rows():
        targets: dict[int, list[Tensor]] = {}
        log_q: dict[int, Tensor] = {}
        distillation = Watched(model, PATTERN, stage)
        with distillation.attached():
            output = distillation(row[None])
            total = torch.stack([multi_layer(targets[layer], log_q[layer]).sum() for layer in targets]).sum()
            total = total / sum(LENGTHS)
            if output.token_losses is not None:
                total = total + output.token_losses.double().sum() / (sum(LENGTHS) - 2)
            total.backward()
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


def by_the_adapter(model: Any, stage: Stage, batch: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    with IndexerLoss(model, PATTERN, stage, **options).attached():
        model(**batch).loss.backward()
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


def check_alike(found: dict[str, Tensor], expected: dict[str, Tensor], only: str = "") -> None:
    names = {name for name in expected if only in name}
    assert names and names == {name for name in found if only in name}
    for name in names:
        torch.testing.assert_close(found[name], expected[name], **EXACT)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("kind", "model_type"),
    [*(("packed", name) for name in INDEXER_ROPES), ("left", "glm_moe_dsa"), ("right", "glm_moe_dsa")],
)
def test_gradients_are_those_of_the_definition(stage: Stage, model_type: str, kind: str) -> None:
    """Of the indexers, in float64; the loss of tokens is computed in float32 by transformers."""
    model = model_of(model_type)
    IndexerLoss(model, PATTERN, stage)  # what trains
    expected = by_definition(model, stage)
    found = by_the_adapter(model, stage, packed() if kind == "packed" else padded(kind))
    check_alike(found, expected, ".indexer.")
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def split_stages(rank: int) -> list[dict[str, Tensor]]:
    return [split(rank, stage) for stage in STAGES]


def split(rank: int, stage: Stage) -> dict[str, Tensor]:
    """A rank has half of the tokens, in which a sequence goes on; gradients are averaged, as DDP does."""
    model, batch = model_of(), packed()
    shifted = torch.cat([batch["labels"][:, 1:], torch.full((1, 1), -100)], 1)
    half = slice(12 * rank, 12 * rank + 12)
    own = {"input_ids": batch["input_ids"][:, half], "position_ids": batch["position_ids"][:, half]}
    items = int((shifted != -100).sum()) / 2  # of a rank's share, since gradients are averaged
    labels = {"labels": own["input_ids"], "shift_labels": shifted[:, half], "num_items_in_batch": torch.tensor(items)}
    found = by_the_adapter(model, stage, {**own, **labels}, group=dist.group.WORLD)
    for gradient in found.values():
        dist.all_reduce(gradient)
    return {name: gradient / 2 for name, gradient in found.items()}


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    """Of all parameters: the keys of the attention itself come from both ranks, too."""
    batch = {**packed(), "num_items_in_batch": torch.tensor(22.0)}
    for rank in on_two_ranks(split_stages, tmp_path):
        for stage, found in zip(STAGES, rank, strict=True):
            expected = by_the_adapter(model_of(), stage, batch)
            check_alike(found, expected, ".indexer.")
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["one", "packed", "left", "right"])
def test_the_kernels_take_the_same_batches(stage: Stage, kind: str) -> None:
    model = model_of().float()
    batch = {"input_ids": rows()[0][None], "labels": rows()[0][None]}
    if kind != "one":
        batch = packed() if kind == "packed" else padded(kind)
    plain, kernels = (by_the_adapter(model, stage, batch, kernels=name) for name in (None, "naive"))
    for name, gradient in plain.items():
        torch.testing.assert_close(kernels[name], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item())


def test_gradient_checkpointing_changes_nothing() -> None:
    model = model_of()
    expected = by_the_adapter(model, "sparse", packed())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check_alike(by_the_adapter(model, "sparse", packed()), expected)


def test_while_evaluating_the_loss_is_the_models_own() -> None:
    model = model_of().eval()
    batch = {"input_ids": rows()[1][None], "labels": rows()[1][None]}
    with IndexerLoss(model, Pattern.full(LAYERS), "sparse").attached(), torch.no_grad():
        inside = model(**batch).loss
    torch.testing.assert_close(inside, model(**batch).loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": None}, "input_ids and inputs_embeds are None"),
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, "attention_mask has 4 dimensions"),
        ({"attention_mask": torch.tensor([[0] + [1] * 23])}, "position_ids begin anew in a padded batch"),
    ],
)
def test_batches_that_are_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        by_the_adapter(model_of(), "warmup", {**packed(), **batch})


def test_a_loss_that_is_not_finite_ends_before_the_step() -> None:
    model = model_of()
    with torch.no_grad():
        model.model.layers[3].self_attn.indexer.wk.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteLossError, match="expected finite numbers"):
        by_the_adapter(model, "sparse", packed())
    assert all(parameter.grad is None for parameter in model.parameters())


def train(folder: Path, steps: int, resume: bool = False) -> Any:
    """Hugging Face's Trainer on a tiny model, from a checkpoint or from the start."""
    torch.manual_seed(0)
    model = model_of().float()
    generator = torch.Generator().manual_seed(1)
    data = [
        {key: row for key in ("input_ids", "labels")} for row in torch.randint(3, VOCAB, (16, 24), generator=generator)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    loss = IndexerLoss(model, PATTERN, "sparse")
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3, 1e-2))
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))  # type: ignore[arg-type]
    with loss.attached():
        if steps < 4:
            trainer.add_callback(stop_at(steps))
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(str(folder / "model"))
    return trainer


def stop_at(steps: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return Stop()


def test_a_training_by_trainer(tmp_path: Path) -> None:
    """Its checkpoints are the model's own, and a run that was stopped goes on to the same weights."""
    pytest.importorskip("accelerate")
    whole = train(tmp_path / "whole", 4)
    losses = [line["loss"] for line in whole.state.log_history if "loss" in line]
    assert len(losses) == 4 and all(map(math.isfinite, losses))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model").state_dict()
    before = model_of().float().state_dict()
    for layer, letter in enumerate(PATTERN.roles):
        name = f"model.layers.{layer}.self_attn.indexer.wk.weight"
        assert torch.equal(saved[name], before[name]) == (letter == "S")
    train(tmp_path / "again", 2)
    train(tmp_path / "again", 4, resume=True)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again" / "model").state_dict()
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    assert all("forward" not in vars(item.indexer) for item in dsa_attentions(whole.model))


@pytest.mark.slow
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_with_trainer.py"])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "train_with_trainer.py"))
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.startswith("KL of the indexers: ") and len(shown.split()) == 4 + 4
    assert (tmp_path / "trained" / "model" / "model.safetensors").is_file()
