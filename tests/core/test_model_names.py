"""Where a model is: folders, hub ids, and what people write in their place."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from indexcache_search.engines.own_server import own_server
from indexcache_search.errors import SearchError
from indexcache_search.hf import loading
from sglang_indexcache.check import main
from sglang_indexcache.checkpoint.checkpoint import Checkpoint, read_config, weights_digest
from sglang_indexcache.families import describe
from sglang_indexcache.io.errors import ModelConfigError
from sglang_indexcache.model.name import ModelName, at_revision
from tests.conftest import tiny_config, tiny_dense_config

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "glm5").mkdir(parents=True)
    (tmp_path / "models" / "glm5" / "config.json").write_text(json.dumps(tiny_config()))
    return tmp_path / "models" / "glm5"


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("zai-org/GLM-5", "zai-org/GLM-5", None),
        ("zai-org/GLM-5@1111111", "zai-org/GLM-5", "1111111"),
        ("owner/Na.me-1@refs/pr/3", "owner/Na.me-1", "refs/pr/3"),
        ("owner/name@v1.0", "owner/name", "v1.0"),
    ],
)
def test_hub_ids(text: str, repository: str, revision: str | None) -> None:
    named = ModelName.parse(text)
    assert (named.folder, named.repository, named.revision) == (None, repository, revision)
    assert named.name == repository


def test_a_folder_goes_before_a_hub_id(folder: Path) -> None:
    odd = folder.parent / "x@y"
    odd.mkdir()
    assert ModelName.parse("models/glm5").name == "glm5" and ModelName.parse("models/x@y").folder == Path("models/x@y")
    assert at_revision("models/glm5", "main") == "models/glm5"
    assert at_revision("owner/name", "v2") == "owner/name@v2" and at_revision("owner/name", None) == "owner/name"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models/glm-5", "models/glm-5: no such folder (is models/glm5 meant?), and not a hub id like owner/name"),
        ("./nothing", "./nothing: no such folder, and not a hub id like owner/name"),
        ("nothing", "nothing: no such folder, and not a hub id like owner/name"),
        ("a/b/c", "a/b/c: no such folder, and not a hub id like owner/name"),
        ("", ": no such folder, and not a hub id like owner/name"),
        ("x" * 5000, "no such folder, and not a hub id"),
        ("owner/name:Q4_K_M", "owner/name:Q4_K_M: no such folder, and not a hub id like owner/name"),
        ('"models/glm5"', "model is '\"models/glm5\"', quotes or white space and all; expected models/glm5"),
        ("models/glm5 ", "quotes or white space and all; expected models/glm5"),
        ("\ufeffmodels/glm5", "and all; expected models/glm5"),
        ("s3://bucket/glm5?key=SECRET", "model is an address (s3://), which is not read here; expected a folder"),
        ("gs://bucket/glm5", "model is an address (gs://), which is not read here"),
        ("oci://registry/glm5:latest", "model is an address (oci://), which is not read here"),
        ("hf://zai-org/GLM-5", "model is an address (hf://); expected zai-org/GLM-5"),
        ("hf://zai-org/GLM-5@v1", "model is an address (hf://); expected zai-org/GLM-5@v1"),
        ("https://huggingface.co/zai-org/GLM-5", "expected zai-org/GLM-5"),
        ("https://huggingface.co/zai-org/GLM-5/tree/abc", "expected zai-org/GLM-5@abc"),
        ("https://huggingface.co/zai-org/GLM-5/blob/main/config.json", "expected zai-org/GLM-5"),
        ("https://me:SECRET@example.com/a/b", "model is an address (https://), which is not read here"),
    ],
)
def test_what_is_neither_is_one_line(folder: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["FSSFSS", "--model", text]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "SECRET" not in error


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-1.safetensors", "tokenizer.json"]
)
def test_lfs_pointers_are_called_that(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    for read in (Checkpoint.read, loading.describe_model):
        with pytest.raises(ModelConfigError, match=f"{name}: a Git LFS pointer, .* expected `git lfs pull`"):
            read(str(folder))


def test_files_of_other_programs(folder: Path) -> None:
    gguf = folder.parent / "GLM.bin"
    gguf.write_bytes(b"GGUF\0\0")
    for path, message in (
        (gguf, "GLM.bin: is a GGUF file, which patterns are not for; expected the folder of a checkpoint"),
        (folder / "config.json", "config.json: is no folder; expected the folder of a checkpoint"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            Checkpoint.read(str(path))
    (folder / "config.json").unlink()
    (folder / "q4.gguf").touch()
    with pytest.raises(ModelConfigError, match=r"has q4.gguf and no config.json; expected a whole checkpoint"):
        Checkpoint.read(str(folder))
    (folder / "adapter_config.json").touch()
    with pytest.raises(ModelConfigError, match=r"has adapter_config.json and no config.json"):
        Checkpoint.read(str(folder))


def test_revisions_are_asked_for_everywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a commit, and an identity that is the commit's whatever it was called."""
    asked: list[tuple[str, str | None]] = []

    def download(repository: str, name: str, revision: str | None = None) -> str:
        asked.append((repository, revision))
        if name != "config.json":
            raise FileNotFoundError(name)
        commit = folder.parent / "snapshots" / ("a" * 40)
        commit.mkdir(parents=True, exist_ok=True)
        (commit / name).write_text(json.dumps(tiny_config()))
        return str(commit / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert Checkpoint.read("owner/name@v2").model.name == "owner/name"
    assert set(asked) == {("owner/name", "v2")}
    assert read_config("owner/name")[1] == "owner/name" and asked[-1] == ("owner/name", None)
    assert weights_digest("owner/name@v2") == weights_digest("owner/name@main")

    given: list[dict[str, Any]] = []
    for auto in ("AutoConfig", "AutoTokenizer"):
        found = {"from_pretrained": lambda **place: given.append(place) or MagicMock()}
        monkeypatch.setattr(loading, auto, type(auto, (), found))
    loading.read_config("owner/name@v2")
    loading.load_tokenizer("owner/name@v2")
    assert [(item["pretrained_model_name_or_path"], item["revision"]) for item in given] == [("owner/name", "v2")] * 2
    with (
        pytest.raises(SearchError, match="--revision is given, which the search would not read"),
        own_server("owner/name", ["--revision=v2"], folder / "log"),
    ):
        pass


def test_a_hub_that_is_not_reached_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client writes a line for each try."""
    client = logging.getLogger("huggingface_hub.utils._http")

    def download(repository: str, name: str, revision: str | None = None) -> str:
        client.warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ModelConfigError, match=r"config\.json can't be had from the hub: OSError: no route"):
        Checkpoint.read("owner/name")
    assert not caplog.records
    client.warning("of somebody else")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("config", "instead"), [(tiny_config(), "--engine sglang"), (tiny_dense_config(), "a copy that is not quantised")]
)
def test_a_quantised_checkpoint_that_transformers_cannot_load_has_a_way_out(
    config: dict[str, Any], instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantised = {**config, "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))

    def needs(*_: Any, **__: Any) -> None:
        raise ImportError("compressed-tensors is not installed")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_config", needs)
    with pytest.raises(SearchError) as error:
        loading.load_model(str(tmp_path), describe(quantised, "tiny"), "auto")
    assert str(error.value).endswith(f"; its weights are quantised (compressed-tensors), expected {instead}")


@pytest.mark.parametrize(
    "names",
    [
        ["layers.{}.attn.indexer.wk.weight"],
        ["model.layers.{}.self_attn.indexer.wq_b.weight_packed"],
        ["language_model.model.layers.{}.self_attn.indexer.wk.weight"],
        ["model.language_model.layers.{}.self_attn.indexer.weights_proj.weight"],
    ],
)
def test_indexers_by_their_other_names(folder: Path, names: list[str]) -> None:
    layers = [0, 2, 5, 6]
    index = {name.format(layer): "x" for name in names for layer in layers}
    index |= {"mtp.layers.1.self_attn.indexer.wk.weight": "x", "nextn.layers.3.attn.indexer.wk.weight": "x"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert Checkpoint.read(str(folder)).indexer_layers == {0, 2, 5}
