"""indexcache-distill and what people have: their folders, their models and data that change, links."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from extras.train.tests.distilling import distill
from indexcache_search.data.packing import Packer

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("no_pictures")]


def test_other_training_data_under_the_same_name_are_another_run(
    model_folder: Path, token_file: Path, tmp_path: Path
) -> None:
    data = tmp_path / "training.jsonl"
    shutil.copy(token_file, data)
    few = {"warmup_steps": 0, "steps": 1}
    assert distill(model_folder, data, tmp_path / "out", **few)[0] == 0
    before = (tmp_path / "out" / "metrics.json").read_bytes()
    data.write_text(data.read_text().replace("[3", "[4", 1).replace("1", "2", 1))
    code, text = distill(model_folder, data, tmp_path / "out", **few)
    assert code == 2 and f"belongs to a run with sha256 of {data}" in " ".join(text.split())
    assert (tmp_path / "out" / "metrics.json").read_bytes() == before
    assert distill(model_folder, data, tmp_path / "out", **few, restart=True)[0] == 0
    assert (tmp_path / "out" / "metrics.json").read_bytes() != before


def test_data_that_change_while_they_are_read_are_refused(
    model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "training.jsonl"
    shutil.copy(token_file, data)
    real = Packer.collect

    def slow(*args: Any, **more: Any) -> Any:
        built = real(*args, **more)
        data.write_text(data.read_text() + "\n")
        return built

    monkeypatch.setattr(Packer, "collect", slow)
    code, text = distill(model_folder, data, tmp_path / "out")
    assert code == 2 and f"sha256 of {data} changed while it was read" in " ".join(text.split())


def test_the_source_is_not_written_over(
    model_folder: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside people's own work, in the folder of the model, and in folders that only look like a run's."""
    shutil.copytree(model_folder, tmp_path / "model")
    for name in ("work/thesis.tex", "tensorboard/events", "metrics.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for model, output in (("model", "."), ("model", "model/out"), ("model", "model"), (model_folder, ".")):
        for restart in ({}, {"restart": True}):
            code, text = distill(Path(model), token_file, Path(output), **restart)
            line = " ".join(text.split())
            assert code == 2 and ("overlap; choose another --output" in line or "metrics.json: is there" in line), text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_links_in_a_model_are_not_followed(model_folder: Path, token_file: Path, tmp_path: Path) -> None:
    """Folders stay behind; a file elsewhere is refused before anything is trained, unless it is of the hub's cache."""
    hub = tmp_path / "models--a--b"
    (hub / "snapshots").mkdir(parents=True)
    model = shutil.copytree(model_folder, hub / "snapshots" / "0123")
    (hub / "blobs").mkdir()
    (model / "tokenizer_config.json").write_text("{}")
    (model / "tokenizer_config.json").rename(hub / "blobs" / "abc")
    (model / "tokenizer_config.json").symlink_to(Path("..") / ".." / "blobs" / "abc")
    (model / "loop").symlink_to(model)
    (tmp_path / "secret.txt").write_text("secret")
    few = {"warmup_steps": 0, "steps": 1}
    code, text = distill(model, token_file, tmp_path / "out", **few)
    assert code == 0, text
    names = {path.name for path in (tmp_path / "out" / "model").iterdir()}
    assert "tokenizer_config.json" in names and "loop" not in names
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    (model / "notes.txt").symlink_to(tmp_path / "secret.txt")
    code, text = distill(model, token_file, tmp_path / "again", **few)
    assert code == 2 and "notes.txt: leads out of the folder" in text and not (tmp_path / "again").exists()
