"""Runs of indexcache-distill that are refused or end: models, options, memory, losses that are no numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from extras.train.tests.distilling import PATTERN, distill
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import read_config
from indexcache_train.distill import memory
from indexcache_train.distill.settings import DistillSettings
from indexcache_train.distill.task import StageTask
from indexcache_train.training.processes import joined
from sglang_indexcache import Pattern
from sglang_indexcache.io.messages import BEGINS_SHARED, NO_INDEXER, OTHER_LENGTH
from tests.conftest import save_model, tiny_config, tiny_model, tiny_v4_config

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("no_pictures")]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SearchError, match="process 1 of this machine has no GPU"), joined("auto", "bfloat16"):
        pass


def test_deepseek_v4_is_not_trained(training: Path, tmp_path: Path) -> None:
    six_letters = [0, 4, 4, 4, 128, 4, 4, 4]
    model = save_model(tiny_v4_config(compress_ratios=six_letters), tmp_path / "model")
    code, text = distill(model, training, tmp_path / "out")
    assert code == 2 and "distillation does not train DeepseekV4ForCausalLM, expected a DSA model" in text


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
