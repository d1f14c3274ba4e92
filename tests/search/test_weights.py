"""Weights as they are loaded: of types that the model expects, each once, and what is digested is what runs."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from indexcache_search.engines.transformers import TransformersEngine
from indexcache_search.hf import loading
from indexcache_search.hf.tensors import read_tensors
from sglang_indexcache import IndexCacheError, Pattern
from sglang_indexcache.checkpoint.checkpoint import weights_digest
from sglang_indexcache.families.dsa.override import indexer_types
from sglang_indexcache.io.errors import FileError, ModelConfigError
from sglang_indexcache.io.messages import MODEL_CHANGED
from tests.conftest import LAYERS, random_tokens, save_model, tiny_config, tiny_dense_config, tiny_v4_config

PROJECTION = "model.layers.2.self_attn.o_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A model of one's own to change."""
    return shutil.copytree(model_folder, tmp_path / "model")


def write(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> None:
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})


def load(folder: Path) -> TransformersEngine:
    return TransformersEngine.load(str(folder), "cpu")


def losses(engine: TransformersEngine) -> tuple[float, ...]:
    [found] = engine.evaluate([Pattern("FSFFSF")], random_tokens(1), "nll", fresh=True)
    return found.losses


def refusal(folder: Path) -> str:
    with pytest.raises(IndexCacheError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def larger(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * 1.5 for name, value in tensors.items()}


def replace_in_place(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write into the file itself, which whoever mapped it into memory sees."""
    write(path.parent, tensors, "other.safetensors")
    with path.open("r+b") as file:
        file.write((path.parent / "other.safetensors").read_bytes())
    (path.parent / "other.safetensors").unlink()


def test_deepseek_v32_by_the_name_of_v3_is_loaded_with_its_indexers(tmp_path: Path) -> None:
    """transformers goes by model_type, and would leave them out."""
    config = tiny_config("deepseek_v32")
    own = losses(load(save_model(config, tmp_path / "model")))
    early = {**config, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(early))
    assert losses(load(tmp_path / "model")) == own
    assert loading.read_config(str(tmp_path / "model")).model_type == "deepseek_v32"
    weights = load_file(tmp_path / "model" / "model.safetensors")
    write(tmp_path / "model", {name: value for name, value in weights.items() if "2.self_attn.indexer" not in name})
    assert "model.layers.2.self_attn.indexer." in refusal(tmp_path / "model")
    write(tmp_path / "model", weights)
    del early["model_type"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(early))
    assert "config.json is refused: " in refusal(tmp_path / "model")


@pytest.mark.parametrize("kind", ["int32", "int8", "uint8", "bool", "float8_e4m3fn", "float64", "complex64"])
def test_a_type_that_nothing_explains(folder: Path, kind: str) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[PROJECTION] = weights[PROJECTION].mul(9).to(getattr(torch, kind))
    write(folder, weights)
    message = refusal(folder)
    assert f"model.safetensors: {PROJECTION} is " in message
    assert message.endswith(", expected F32 or BF16 or F16: config.json has no quantization_config")


def test_a_quantisation_explains_its_own_types_alone(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    weights = load_file(folder / "model.safetensors")
    write(folder, weights | {PROJECTION: weights[PROJECTION].int()})
    assert "is I32, expected F32 or BF16 or F16 or F8_E4M3" in refusal(folder)
    write(folder, weights | {PROJECTION: weights[PROJECTION].to(torch.float8_e4m3fn)})
    message = refusal(folder)  # without accelerate transformers has its own reasons on a CPU
    assert "is F8_E4M3, expected" not in message
    assert PROJECTION not in message or message.endswith(f"expected {PROJECTION}_scale_inv in the checkpoint")


def test_whole_numbers_where_the_model_has_them(tmp_path: Path) -> None:
    """DeepSeek-V4's first layers look their experts up in a table."""
    folder = save_model(tiny_v4_config(), tmp_path / "v4")
    weights = load_file(folder / "model.safetensors")
    [table] = [name for name, value in weights.items() if not value.is_floating_point()]
    load(folder)
    write(folder, weights | {table: weights[table].float()})
    assert f"{table} is F32, expected I32 or I64" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        PROJECTION + "_scale_inv",
        "model.layers.2.self_attn.o_proj.bias",
        f"model.layers.{LAYERS}.self_attn.o_proj.weight",
        "model.layers.2.self_attn.indexer.extra.weight",
        "visual.patch_embed.weight",
    ],
)
def test_a_weight_that_the_model_has_no_place_for(folder: Path, name: str) -> None:
    write(folder, load_file(folder / "model.safetensors") | {name: torch.ones(1)})
    assert f"{name} is in the checkpoint, and config.json has no place for it" in refusal(folder)


def test_a_weight_by_two_names(folder: Path) -> None:
    weights, name = load_file(folder / "model.safetensors"), PROJECTION.removeprefix("model.")
    write(folder, weights | {name: weights[PROJECTION] + 1})
    assert f"has {name} and {PROJECTION}; expected one of them" in refusal(folder)


def test_weights_that_are_known_never_to_run(tmp_path: Path) -> None:
    """Indexers of layers that share, and a NextN layer behind the last one."""
    config = tiny_config(indexer_types=indexer_types(Pattern("FFSFFF")), num_nextn_predict_layers=1)
    folder = save_model(config, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    indexer = "model.layers.1.self_attn.indexer.wk.weight"
    behind = {f"model.layers.{LAYERS}.{name}.weight": torch.ones(2) for name in ("eh_proj", "self_attn.o_proj")}
    write(folder, weights | behind | {indexer.replace(".1.", ".2."): weights[indexer].clone()})
    assert load(folder).model.locked == (2,)


def test_a_weight_that_is_not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[PROJECTION][0, 0] = torch.inf
    write(folder, weights)
    assert f"{PROJECTION} is not finite; expected numbers alone" in refusal(folder)


def test_a_head_that_is_tied_and_is_not(tmp_path: Path) -> None:
    folder = save_model(tiny_dense_config(tie_word_embeddings=True), tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    for scale in (1.0, 2.0):
        write(folder, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * scale})
        if scale == 1.0:
            load(folder)
        else:
            assert "lm_head.weight is not model.embed_tokens.weight" in refusal(folder)


def in_parts(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Write the model as two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for part, own in parts.items():
        write(folder, {name: weights[name] for name in own}, part)
    places = {name: part for part, own in parts.items() for name in own}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return {part: {name: weights[name] for name in own} for part, own in parts.items()}


def test_an_index_and_its_files(folder: Path, model_folder: Path) -> None:
    parts = in_parts(folder)
    assert losses(load(folder)) == losses(load(model_folder))
    one, two = parts["one.safetensors"], parts["two.safetensors"]
    first = min(two)
    write(folder, one | {first: two[first] + 1}, "one.safetensors")
    assert f"{first} stands in one.safetensors and in two.safetensors; expected it once" in refusal(folder)
    write(folder, one | {"more.weight": torch.ones(1)}, "one.safetensors")
    assert "more.weight stands in no file, found it in one.safetensors" in refusal(folder)
    write(folder, {name: one[name] for name in list(one)[1:]}, "one.safetensors")
    assert "stands in one.safetensors, found it in no file" in refusal(folder)
    write(folder, one, "one.safetensors")
    write(folder, one | two)
    assert "has model.safetensors and model.safetensors.index.json, which names other files" in refusal(folder)
    (folder / "model.safetensors").unlink()
    (folder / "two.safetensors").unlink()
    assert f"{INDEX}: names 'two.safetensors', and there is no such file" in refusal(folder)
    (folder / INDEX).unlink()
    assert "is not in the checkpoint" in refusal(folder)
    (folder / "one.safetensors").rename(folder / "pytorch_model.bin")
    assert "no safetensors file, found pytorch_model.bin; expected model.safetensors, or" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "no safetensors file, found none" in refusal(folder)


def test_an_adapter_beside_the_weights(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: adapters are not loaded" in refusal(folder)


BYTE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (HEADER, 8, None),
        ({"__metadata__": {"format": "pt"}, **HEADER}, 8, None),
        ({"u": BYTE, "b": HEADER["a"] | {"data_offsets": [1, 9]}}, 9, None),
        (HEADER, 7, "is cut off, 1 bytes are missing"),
        (HEADER, 9, "1 bytes too many"),
        ({"a": HEADER["a"] | {"shape": [3]}}, 8, "a does not lie where its shape says"),
        ({"a": HEADER["a"] | {"shape": [-1, -2]}}, 8, "a does not lie where its shape says"),
        ({**HEADER, "b": HEADER["a"]}, 8, "b does not lie where its shape says"),
        ({"a": HEADER["a"] | {"data_offsets": [4, 12]}}, 12, "a does not lie where its shape says"),
        ({"a": HEADER["a"] | {"dtype": "F4"}}, 8, "a is F4, expected one of BOOL, "),
        ({"a": {}}, 8, "not a safetensors file"),
        ([], 8, "not a safetensors file"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": 1}', 8, "not a safetensors file"),
    ],
)  # fmt: skip
def test_headers(tmp_path: Path, header: Any, data: int, message: str | None) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    if message is None:
        assert all(value.eq(0).all() for value in read_tensors(path).tensors.values())
    else:
        with pytest.raises(FileError, match=message):
            read_tensors(path)


def test_a_pointer_in_the_place_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "model.safetensors: a Git LFS pointer" in refusal(folder)


def during(monkeypatch: pytest.MonkeyPatch, place: str, change: Callable[[], object]) -> None:
    """Let `change` happen once, when loading comes to `place`."""
    original, pending = getattr(loading, place), [change]

    def interrupted(*given: Any, **named: Any) -> Any:
        while pending:
            pending.pop()()
        return original(*given, **named)

    monkeypatch.setattr(loading, place, interrupted)


@pytest.mark.parametrize("place", ["_check_tied", "_unexplained", "whole_numbers"])
@pytest.mark.parametrize("how", ["a folder in its place", "written into", "its configuration"])
def test_a_model_that_is_replaced_while_it_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, how: str
) -> None:
    """Never the weights of one with the name of the other."""
    path = folder / "model.safetensors"
    other = shutil.copytree(folder, folder.with_name("other"))
    write(other, larger(load_file(path)))
    before, after = weights_digest(str(folder)), weights_digest(str(other))

    def change() -> None:
        if how == "a folder in its place":
            folder.rename(folder.with_name("old"))
            other.rename(folder)
        elif how == "written into":
            replace_in_place(path, load_file(other / "model.safetensors"))
        else:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"index_topk": 4}))

    during(monkeypatch, place, change)
    if place == "whole_numbers" and how != "its configuration":  # before a byte of it was read: simply the other model
        assert load(folder).weights_sha256 == after != before
    else:
        assert f"{'config.json' if how == 'its configuration' else 'model.safetensors'}: changed" in refusal(folder)


def test_weights_that_change_under_a_run(folder: Path) -> None:
    """What runs is what was digested; results are refused until the files are what they were."""
    path, copy = folder / "model.safetensors", folder.with_name("copy.safetensors")
    shutil.copy2(path, copy)
    engine = load(folder)
    assert engine.weights_sha256 == weights_digest(str(folder))
    before = losses(engine)
    replace_in_place(path, larger(load_file(path)))
    assert losses(engine) == before
    with pytest.raises(ModelConfigError, match=rf"model\.safetensors: {MODEL_CHANGED}; expected the"):
        engine.check_unchanged()
    assert losses(load(folder)) != before
    path.unlink()
    with pytest.raises(ModelConfigError, match=r"model\.safetensors: changed"):
        engine.check_unchanged()
    shutil.copy2(copy, path)
    engine.check_unchanged()
    assert load(folder).weights_sha256 == engine.weights_sha256


def test_of_a_model_of_the_hub_only_what_is_loaded_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, list[str]]] = []

    def fetch(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(loading, "snapshot_download", fetch)
    assert loading.model_folder("owner/name@v1") == folder
    assert asked[0][:2] == ("owner/name", "v1") and "*.json" in asked[0][2]
    assert asked[1][2] == ["model.safetensors"]
    in_parts(folder)
    loading.model_folder("owner/name@v1")
    assert asked[-1][2] == ["one.safetensors", "two.safetensors"]
