"""indexcache-distill on tiny models: what it writes and shards, and its schedules."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from extras.train.tests.distilling import PATTERN, arguments, distill, in_two_processes, records, train_alike
from indexcache_train.cli import app
from indexcache_train.distill.settings import DistillSettings
from indexcache_train.training.order import rows_of_step
from sglang_indexcache import Pattern
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.pattern_file.file import PatternFile
from tests.conftest import save_model, tiny_config, tiny_model

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("no_pictures")]


def test_a_run(trained: Path, model_folder: Path) -> None:
    log = records(trained)
    steps = [line for line in log if "losses" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["stage"] for line in steps] == ["warmup"] * 2 + ["sparse"] * 4
    assert all("loss" not in line and "norm_body" not in line for line in steps[:2])
    assert all(np.isfinite([line["loss"], line["kl"], line["norm_body"]]).all() for line in steps[2:])
    assert [(line["stage"], line["step"]) for line in log if "losses" in line] == [
        *(("original", 0), ("training-free", 0), ("warmup", 2), ("sparse", 4), ("sparse", 6))
    ]
    curves = (trained / "curves.svg").read_text()
    assert curves.startswith("<?xml") and "</svg>" in curves
    metrics = json.loads((trained / "metrics.json").read_text())
    assert [row["loss"] for row in metrics["rows"]] == [line["held_out_loss"] for line in log if "losses" in line]
    assert metrics["rows"][0]["increase"] == 0 and metrics["settings"]["pattern"] == PATTERN
    before, after = (load_file(folder / "model.safetensors") for folder in (model_folder, trained / "model"))
    dropped = {name for name in before if any(f"layers.{layer}.self_attn.indexer" in name for layer in (1, 2, 4, 5))}
    assert len(dropped) == 20 and before.keys() - after.keys() == dropped
    unchanged = {name for name in after if torch.equal(before[name], after[name])}
    assert all("e_score_correction_bias" in name or "experts" in name for name in unchanged)


def test_the_result_can_be_served(trained: Path) -> None:
    file = PatternFile.load(str(trained / "pattern.yaml"))
    assert file.pattern == PATTERN and file.model.locked_layers == (1, 2, 4, 5)
    assert Checkpoint.read(str(trained / "model")).misfits(file.as_pattern(), file) == []
    config = json.loads((trained / "model" / "config.json").read_text())
    assert config["index_topk_pattern"] == PATTERN and config["indexer_types"][1] == "shared"
    model, report = AutoModelForCausalLM.from_pretrained(trained / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert [layer.self_attn.indexer is None for layer in model.model.layers] == [letter == "S" for letter in PATTERN]


def test_a_body_whose_learning_rate_is_0_stays(model_folder: Path, training: Path, tmp_path: Path) -> None:
    code, text = distill(model_folder, training, tmp_path / "out", warmup_steps=0, steps=2, lr=0)
    assert code == 0, text
    before, after = (load_file(folder / "model.safetensors") for folder in (model_folder, tmp_path / "out" / "model"))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if ".indexer." in name}


def test_the_demo(tmp_path: Path) -> None:
    """What happens without options, for one step of each stage."""
    few = ["--warmup", "steps=1", "--sparse", "steps=1", "--seq-len", "80", "--num-sequences", "4"]
    few += ["--num-eval-sequences", "6", "--device", "cpu"]
    result = CliRunner().invoke(app, [*few, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["settings"]["pattern"] == "FSSS" * 4 and len(metrics["rows"]) == 4
    assert (tmp_path / "out" / "model" / "tokenizer.json").is_file()


def test_shared_indexers_are_kept_by_choice(model_folder: Path, training: Path, tmp_path: Path) -> None:
    code, text = distill(model_folder, training, tmp_path / "out", warmup_steps=0, steps=1, shared_indexers="keep")
    assert code == 0, text
    before, after = (load_file(folder / "model.safetensors") for folder in (model_folder, tmp_path / "out" / "model"))
    assert before.keys() == after.keys()
    name = "model.layers.1.self_attn.indexer.wk.weight"
    assert torch.equal(before[name], after[name])


def test_deepseek_keeps_all_indexers(training: Path, tmp_path: Path) -> None:
    """transformers would make the missing ones up."""
    model = save_model(tiny_config("deepseek_v32"), tmp_path / "model")
    code, text = distill(model, training, tmp_path / "out", shared_indexers="drop")
    assert code == 2 and "would make up the missing ones; expected keep" in text
    code, text = distill(model, training, tmp_path / "out", warmup_steps=0, steps=1)
    assert code == 0, text
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out" / "model"))
    assert before.keys() == after.keys()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_bfloat16_checkpoint_stays_one(training: Path, tmp_path: Path, dtype: str) -> None:
    """Whatever is computed in, what trains is float32 meanwhile."""
    folder = tmp_path / "model"
    tiny_model(tiny_config()).bfloat16().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**tiny_config(), "dtype": "bfloat16"}))
    code, text = distill(folder, training, tmp_path / "out", warmup_steps=1, steps=1, dtype=dtype)
    assert code == 0, text
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out" / "model"))
    wider = {name for name, value in after.items() if value.dtype != before[name].dtype}
    float32 = ("mlp.gate.e_score_correction_bias", "mlp.gate.weight")  # transformers reads the first, from 5.24 on both
    assert all(name.endswith(float32) for name in wider)
    assert all(np.isfinite(line["kl"]) for line in records(tmp_path / "out") if "kl" in line)


def test_what_transformers_leaves_out_is_copied(training: Path, tmp_path: Path) -> None:
    config = tiny_config(num_nextn_predict_layers=1)
    model = save_model(config, tmp_path / "model")
    extra = {"model.layers.6.eh_proj.weight": torch.arange(6.0).view(2, 3)}
    save_file(
        {**load_file(model / "model.safetensors"), **extra}, model / "model.safetensors", metadata={"format": "pt"}
    )
    code, text = distill(model, training, tmp_path / "out", warmup_steps=1, steps=1)
    assert code == 0, text
    index = json.loads((tmp_path / "out" / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    found = load_file(tmp_path / "out" / "model" / index["model.layers.6.eh_proj.weight"])
    assert torch.equal(found["model.layers.6.eh_proj.weight"], extra["model.layers.6.eh_proj.weight"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


def test_tensorboard(model_folder: Path, training: Path, tmp_path: Path) -> None:
    code, text = distill(model_folder, training, tmp_path / "out", warmup_steps=1, steps=1, tensorboard="yes")
    assert code == 0, text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("kl")] == [1, 2]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_schedules(schedule: Any) -> None:
    settings = DistillSettings(
        pattern=Pattern(PATTERN), warmup_steps=100, sparse_steps=200, schedule=schedule, ramp_steps=10
    )
    rates = [settings.rate(step) for step in range(300)]
    assert rates[0] == rates[100] == pytest.approx(0.1)
    assert max(rates) <= 1 and rates[9] == pytest.approx(1, abs=0.03)
    expected = {"cosine": 0.1, "wsd": 0.025, "constant": 1.0}[schedule]
    assert rates[-1] == pytest.approx(expected, abs=0.001)
    if schedule == "wsd":
        assert rates[100 + 150] == 1


def test_every_epoch_takes_each_row_once() -> None:
    rows = np.concatenate([rows_of_step(step, 4, 10, seed=3) for step in range(10)])
    epochs = rows.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and not (epochs[0] == epochs[1]).all()
    assert np.array_equal(rows_of_step(1, 14, 10, seed=3), rows[14:28])  # of three epochs


def test_two_processes_train_as_one_does(trained: Path, model_folder: Path, training: Path, tmp_path: Path) -> None:
    """FSDP2 over gloo: weights, gradients and optimizer sharded, the same losses."""
    words = arguments(model_folder, training, tmp_path / "out")
    in_two_processes(words, tmp_path / "log")
    train_alike(trained, tmp_path / "out", 1e-5)


KERNELS_ON_CPU = """
import torch

from indexcache_train.__main__ import main
from indexcache_train.distill import model, run

run.resolve_attention = lambda attention, _: attention  # kernels with their definitions in PyTorch
forward = model.Distillation.__call__


def checked(self, *given):
    output = forward(self, *given)
    assert output.divergences.dtype == torch.float32
    assert output.token_losses is None or output.token_losses.dtype == torch.float32
    return output


model.Distillation.__call__ = checked
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "attention", "bound"),
    [
        ("glm_moe_dsa", "float32", "naive", 1e-5),
        ("deepseek_v32", "bfloat16", "kernels", 1e-2),
        ("deepseek_v32", "float32", "naive", 1e-5),
        ("glm_moe_dsa", "bfloat16", "kernels", 1e-2),
    ],
)
def test_two_processes_of_torchrun_train_as_one_does(
    kind: str, dtype: str, attention: str, bound: float, training: Path, tmp_path: Path
) -> None:
    model = save_model(tiny_config(kind), tmp_path / "model")
    script = ["-m", "indexcache_train"]
    if attention == "kernels":
        script = [str(tmp_path / "kernels_on_cpu.py")]
        Path(script[0]).write_text(KERNELS_ON_CPU)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, *launcher, *script]
        command += arguments(model, training, tmp_path / name, dtype=dtype, attention=attention)
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
    train_alike(tmp_path / "one", tmp_path / "two", bound)
