"""indexcache-distill on tiny models: what it writes, resumes, shards and refuses."""

from __future__ import annotations

import json
import shutil
import signal
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
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import read_config
from indexcache_train.cli import app
from indexcache_train.distill import memory
from indexcache_train.distill.settings import DistillSettings
from indexcache_train.distill.task import StageTask
from indexcache_train.training.loop import Loop
from indexcache_train.training.order import rows_of_step
from indexcache_train.training.processes import joined
from sglang_indexcache import Pattern
from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.io.messages import BEGINS_SHARED, MODEL_CHANGED, NO_INDEXER, OTHER_LENGTH
from sglang_indexcache.pattern_file.file import PatternFile
from tests.conftest import save_model, tiny_config, tiny_model, tiny_v4_config
from tests.forked import forked, killed_at

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


def test_the_same_command_again_trains_nothing(trained: Path, model_folder: Path, training: Path) -> None:
    before = (trained / "log.jsonl").read_bytes(), (trained / "model" / "model.safetensors").stat().st_mtime_ns
    code, text = distill(model_folder, training, trained)
    assert code == 0 and "after sparse training" in text
    assert (
        (trained / "log.jsonl").read_bytes(),
        (trained / "model" / "model.safetensors").stat().st_mtime_ns,
    ) == before


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of the whole run, without its result: as killed before the end was written."""
    output = shutil.copytree(trained, tmp_path / "out")
    shutil.rmtree(output / "model")
    return output


def test_a_damaged_checkpoint_is_passed_over(finished: Path, trained: Path, model_folder: Path, training: Path) -> None:
    """The one before it is used, and the run ends as it would have."""
    *_, last = sorted((finished / "work" / "checkpoints").iterdir())
    weights = last / "process-0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, text = distill(model_folder, training, finished)
    assert code == 0, text
    assert records(finished) == records(trained)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (finished, trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    shutil.rmtree(finished / "model")
    for path in sorted((finished / "work" / "checkpoints").iterdir()):
        (path / "checkpoint.json").write_text("{}")
    code, text = distill(model_folder, training, finished)
    assert code == 2 and "is damaged, and no other checkpoint is whole; --restart trains anew" in text.replace(
        "\n", " "
    )


def test_checkpoints_are_read_without_running_anything(trained: Path) -> None:
    """No pickles: safetensors, and JSON."""
    names = {path.name for path in (trained / "work" / "checkpoints").rglob("*") if path.is_file()}
    assert names == {"process-0.safetensors", "process-0.json", "checkpoint.json"}


@pytest.mark.parametrize(
    ("path", "damage", "message"),
    [
        ("log.jsonl", lambda text: text.replace(b'"step": 2', b'"step": 3', 1), "is damaged"),
        ("log.jsonl", lambda text: b"\n".join(text.split(b"\n")[1:]), "line 1 is damaged"),
        ("log.jsonl", lambda text: text[: len(text) // 2], "does not reach step 6"),
        ("work/data/training/tokens.npy", lambda text: text[:-4] + b"\1\0\0\0", "the stored tokens are damaged"),
        ("work/data/training/tokens.npy", lambda text: text[:-40], "the stored tokens are damaged"),
        ("work/data/training/set.json", lambda text: b"{", "the stored tokens are damaged"),
        ("work/run.json", lambda text: text[:20], "not JSON"),
    ],
)
def test_a_damaged_run_is_not_gone_on_with(
    finished: Path, model_folder: Path, training: Path, path: str, damage: Any, message: str
) -> None:
    (finished / path).write_bytes(damage((finished / path).read_bytes()))
    code, text = distill(model_folder, training, finished)
    assert code == 2 and message in " ".join(text.split()), text


def test_another_models_weights_are_another_run(
    finished: Path, model_folder: Path, training: Path, tmp_path: Path
) -> None:
    """The same name, the same config.json, other weights or another tokenizer: nothing of the first run is used."""
    other = shutil.copytree(model_folder, tmp_path / "elsewhere" / model_folder.name)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    code, text = distill(other, training, finished)
    assert code == 2 and "belongs to a run with weights_sha256" in " ".join(text.split())
    same = shutil.copytree(model_folder, tmp_path / "again" / model_folder.name)
    (same / "tokenizer.json").write_text("{}")
    code, text = distill(same, training, finished)
    assert code == 2 and "belongs to a run with tokenizer_sha256" in " ".join(text.split())


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_base_that_changes_while_it_is_trained(
    model_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    base, train = shutil.copytree(model_folder, tmp_path / model_folder.name), Loop.train
    (base / "tokenizer.json").write_text("{}")

    def change(*given: Any) -> None:
        train(*given)
        (base / name).write_text("other")

    monkeypatch.setattr(Loop, "train", change)
    code, text = distill(base, training, tmp_path / "out")
    assert code == 2 and f"{name}: {MODEL_CHANGED}" in " ".join(text.split())
    assert not (tmp_path / "out" / "model").exists() and not (tmp_path / "out" / "metrics.json").exists()


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SearchError, match="process 1 of this machine has no GPU"), joined("auto", "bfloat16"):
        pass


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


def test_deepseek_v4_is_not_trained(training: Path, tmp_path: Path) -> None:
    six_letters = [0, 4, 4, 4, 128, 4, 4, 4]
    model = save_model(tiny_v4_config(compress_ratios=six_letters), tmp_path / "model")
    code, text = distill(model, training, tmp_path / "out")
    assert code == 2 and "distillation does not train DeepseekV4ForCausalLM, expected a DSA model" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


def test_a_loss_that_is_not_finite_ends_the_run(
    model_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DistillSettings, "rate", lambda *_: 1e18)
    changes = {"warmup_steps": 0, "steps": 20, "lr": 1, "checkpoint_every": 1, "max_norm": 1e6}
    code, text = distill(model_folder, training, tmp_path / "out", **changes)
    assert code == 1
    line = " ".join(text.splitlines()[-1].split())
    assert (
        line.startswith("indexcache-distill: step ") and "expected finite numbers; the last good checkpoint is" in line
    )
    assert Path(line.rpartition(" ")[2]).is_dir() and not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "FSS"}, OTHER_LENGTH.format(3, 6)),
        ({"pattern": "SFFFFF"}, BEGINS_SHARED),
        ({"pattern": "uniform@2/3"}, "uniform needs retentions of the form 1/n, found 2/3"),
        ({"pattern": "missing.yaml"}, "missing.yaml"),
        ({"training": "missing.jsonl"}, "missing.jsonl: no such file"),
        ({"warmup_steps": 0, "steps": 0}, "lr needs steps above 0"),
        ({"micro_batch": 3}, "--batch-size is 4, expected a multiple of micro_batch x processes = 3 x 1"),
        ({"seq_len": 8}, "--seq-len is 8, but queries see every token up to position 8 (index_topk is 8)"),
        ({"seq_len": 512}, "--seq-len is 512, but the model was made for 256 tokens"),
        ({"num_sequences": 4000}, "training sequences of 32 tokens, 4000 were asked for"),
        ({"dtype": "int8"}, "'--dtype': "),
        ({"attention": "fast"}, "attention: found 'fast', expected one of auto, naive, kernels"),
        ({"attention": "kernels"}, "--engine attention=kernels needs a CUDA device, found cpu"),
        ({"device": "cuda:1"}, "'--device': "),
    ],
)
def test_refusals(model_folder: Path, training: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    code, text = distill(model_folder, training, tmp_path / "out", **changes)
    assert code == 2 and message in text and len(text.strip().splitlines()) == 1


def test_missing_indexers_are_refused(training: Path, tmp_path: Path) -> None:
    types = ["full", "shared", "full", "shared", "shared", "full"]
    model = save_model(tiny_config(indexer_types=types), tmp_path / "model")
    code, text = distill(model, training, tmp_path / "out", pattern="FFSFSS")
    assert code == 2 and f"pattern has F for layer 1, 3, but the checkpoint has {NO_INDEXER}" in text


def test_quantised_weights_are_refused(model_folder: Path, training: Path, tmp_path: Path) -> None:
    config = {**tiny_config(), "quantization_config": {"quant_method": "fp8"}}
    model = save_model(tiny_config(), tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    code, text = distill(model, training, tmp_path / "out")
    assert code == 2 and "its weights are quantised" in text


def test_another_run_in_the_same_folder_is_refused(trained: Path, model_folder: Path, training: Path) -> None:
    code, text = distill(model_folder, training, trained, loss="own")
    assert code == 2 and "belongs to a run with loss multi, now it is own" in text


def test_too_little_memory_is_refused_before_it_starts(
    model_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda *_: 100_000)
    code, text = distill(model_folder, training, tmp_path / "out")
    assert code == 2 and "GB are needed in each process" in text and "memory_check=no" in text
    assert not (tmp_path / "out").exists()
    code, text = distill(model_folder, training, tmp_path / "out", warmup_steps=0, steps=1, memory_check="no")
    assert code == 0, text


def test_running_out_of_memory_is_one_line(
    model_folder: Path, training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA")

    monkeypatch.setattr(StageTask, "step", fail)
    code, text = distill(model_folder, training, tmp_path / "out")
    assert code == 2 and "out of memory with --seq-len" in text and "Traceback" not in text


def test_memory_grows_with_what_needs_it(model_folder: Path) -> None:
    config, pattern = read_config(str(model_folder)), Pattern(PATTERN)
    given: dict[str, Any] = {"seq_len": 128, "micro_batch_size": 1, "processes": 1, "bfloat16": False}
    given |= {"gradient_checkpointing": True, "kernels": False}
    base = memory.estimate(config, pattern, "sparse", **given)
    parameters = sum(p.numel() for p in tiny_model(tiny_config()).parameters())
    dropped = 4 * sum(p.numel() for p in tiny_model(tiny_config()).model.layers[0].self_attn.indexer.parameters())
    assert base.weights == 16 * (parameters - dropped) + 4 * dropped
    longer = memory.estimate(config, pattern, "sparse", **{**given, "seq_len": 256})
    assert 2 < longer.activations / base.activations <= 4 and longer.weights == base.weights
    kept = memory.estimate(config, pattern, "sparse", **{**given, "gradient_checkpointing": False})
    assert kept.activations > base.activations
    lean = [memory.estimate(config, pattern, "sparse", **{**given, "kernels": True, "seq_len": n}) for n in (128, 256)]
    assert lean[1].activations <= 2.1 * lean[0].activations
    assert memory.estimate(config, pattern, "warmup", **given).weights < base.weights / 2
    with pytest.raises(SearchError, match=r"cpu has 0\.0 free"):
        memory.check(base, base.total - 1, "cpu")
    memory.check(base, base.total, "cpu")


def test_tensorboard(model_folder: Path, training: Path, tmp_path: Path) -> None:
    code, text = distill(model_folder, training, tmp_path / "out", warmup_steps=1, steps=1, tensorboard="yes")
    assert code == 0, text
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("kl")] == [1, 2]


def test_a_model_that_was_emptied_is_written_again(finished: Path, model_folder: Path, training: Path) -> None:
    (finished / "model").mkdir()
    code, text = distill(model_folder, training, finished)
    assert code == 2 and "model: is there already, and no indexcache-run.json says" in " ".join(text.split())
    (finished / "model").rmdir()
    code, text = distill(model_folder, training, finished)
    assert code == 0 and f"Wrote {finished / 'log.jsonl'}"[:6] in text and str(finished / "model") in text
    (finished / "model" / "tokenizer.json").unlink(missing_ok=True)
    (finished / "model" / "model.safetensors").unlink()
    (finished / "pattern.yaml").unlink()
    code, text = distill(model_folder, training, finished)
    assert code == 0 and (finished / "model" / "model.safetensors").is_file()
    assert PatternFile.load(finished / "pattern.yaml").pattern == PATTERN
    (finished / "pattern.yaml").write_text("edited")
    code, text = distill(model_folder, training, finished)
    assert code == 2 and "pattern.yaml: was changed since indexcache-distill wrote it" in " ".join(text.split())


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


@pytest.mark.slow
@pytest.mark.parametrize("lines", [4, 7])
def test_a_killed_run_goes_on_to_the_same_losses(
    trained: Path, model_folder: Path, training: Path, tmp_path: Path, lines: int
) -> None:
    process = forked("indexcache_train", arguments(model_folder, training, tmp_path / "out"))
    killed_at(process, tmp_path / "out" / "log.jsonl", lines)
    assert process.exitcode == -signal.SIGKILL
    code, text = distill(model_folder, training, tmp_path / "out")
    assert code == 0, text
    assert records(tmp_path / "out") == records(trained)
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "out", trained))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


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
