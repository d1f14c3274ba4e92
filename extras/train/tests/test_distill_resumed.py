"""Runs of indexcache-distill that go on: after kills, with damaged or changed files, or not at all."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from extras.train.tests.distilling import PATTERN, arguments, distill, records
from indexcache_train.training.loop import Loop
from sglang_indexcache.io.messages import MODEL_CHANGED
from sglang_indexcache.pattern_file.file import PatternFile
from tests.forked import forked, killed_at

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


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


def test_another_run_in_the_same_folder_is_refused(trained: Path, model_folder: Path, training: Path) -> None:
    code, text = distill(model_folder, training, trained, loss="own")
    assert code == 2 and "belongs to a run with loss multi, now it is own" in text


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
