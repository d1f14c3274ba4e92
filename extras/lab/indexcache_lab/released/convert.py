"""Write a released checkpoint as a plain Llama model with eviction heads and its plan."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import sglang_indexcache
from indexcache_lab.eviction.heads import FILE, EvictionHeads
from indexcache_lab.released.formats import Released
from indexcache_search.errors import SearchError
from indexcache_search.evaluation.identity import today
from indexcache_search.hf.loading import describe_model, model_folder, read_config
from indexcache_search.hf.tensors import read_tensors
from indexcache_search.workdir.folder import OwnFolder
from indexcache_search.workdir.overlap import check_apart
from indexcache_train.distill.export import copy_files
from indexcache_train.training import tree
from sglang_indexcache.io.atomic import read_json_object, write_atomically
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.io.naming import naming
from sglang_indexcache.model.files import CONFIG, INDEX, tensor_files
from sglang_indexcache.pattern import FULL, Pattern
from sglang_indexcache.pattern_file.file import ModelSection, PatternFile

COMMAND = "indexcache-lab released"
PATTERN = "pattern.yaml"
_MAX_CONFIG_BYTES = 1 << 20
_HEAD = re.compile(r"^model\.layers\.(\d{1,6})\.self_attn\.(A|delta\.weight)$")
_ADDED = re.compile(r"\.(o_proj|down_proj)\.weight$")
_EMBEDDINGS, _LOGITS = "model.embed_tokens.weight", "lm_head.weight"


def convert(model: str, output: Path) -> list[Path]:
    """Write `output/model`, a plain Llama, and `output/pattern.yaml`, how its layers select; return both.

    Eviction heads are beside the weights, as `indexcache-lab eviction` writes them. MiniCPM's scales are multiplied
    into the weights, in float32, and rounded to the checkpoint's dtype.

    Args:
        model: folder or hub id of a NOSA or MiniCPM4 checkpoint.
        output: a new folder, or one that this command wrote.

    Raises:
        IndexCacheError: if the checkpoint is of another form, or a file of somebody else is in the way.
    """
    folder = model_folder(model)
    released = Released.read(read_json_object(folder / CONFIG, _MAX_CONFIG_BYTES), model)
    check_apart({"--output": output}, [output / PATTERN], {"--model": [model]})
    with OwnFolder(output, COMMAND, [PATTERN], "--output").held() as own:
        with tree.replaced(output / "model", output, COMMAND) as unfinished:
            try:
                _write(folder, released, unfinished, model)
                text = _plan(unfinished, released).dumps()
            except IndexCacheError as error:  # of a config.json that was copied
                raise SearchError(str(error).replace(str(unfinished), model)) from None
        own.write(PATTERN, text)
    return [output / "model", output / PATTERN]


def _write(folder: Path, released: Released, target: Path, model: str) -> None:
    copy_files(folder, target)
    for code in target.glob("*.py"):  # the checkpoint's own, which a plain Llama does not need
        code.unlink()
    write_atomically(target / CONFIG, json.dumps(released.config, indent=2) + "\n")
    heads, place, embeddings = dict[str, Tensor](), dict[str, str](), None
    for name in tensor_files(folder):
        if not name.endswith(".safetensors"):
            raise SearchError(f"{model}: {name} is no safetensors file, expected these alone")
        tensors = read_tensors(folder / name).tensors
        heads |= {key: tensors.pop(key) for key in list(tensors) if _HEAD.match(key)}
        embeddings = tensors.get(_EMBEDDINGS, embeddings)
        scaled = {key: _scaled(key, value, released) for key, value in tensors.items()}
        place |= dict.fromkeys(scaled, name)
        _save(scaled, target / name)
    if released.logits != 1.0 and _LOGITS not in place:  # tied, until both have scales of their own
        if embeddings is None:
            raise SearchError(f"{model}: {_EMBEDDINGS} is not in the checkpoint, expected it")
        _save({_LOGITS: _times(embeddings, released.logits)}, target / "model-lm-head.safetensors")
        place[_LOGITS] = "model-lm-head.safetensors"
    if len(set(place.values())) > 1:
        write_atomically(target / INDEX, json.dumps({"metadata": {}, "weight_map": place}, indent=1) + "\n")
    if released.heads:
        _eviction_heads(heads, target, model).save(target / FILE)
    elif heads:
        raise SearchError(f"{model}: has {sorted(heads)[0]}, expected no eviction heads in this architecture")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    with naming(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _scaled(name: str, tensor: Tensor, released: Released) -> Tensor:
    if name == _EMBEDDINGS:
        return _times(tensor, released.embedding)
    if name == _LOGITS:
        return _times(tensor, released.logits)
    return _times(tensor, released.residual) if _ADDED.search(name) else tensor


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else (tensor.float() * factor).to(tensor.dtype)


def _eviction_heads(tensors: Mapping[str, Tensor], folder: Path, model: str) -> EvictionHeads:
    """Make heads of `A`, `[G]`, and `delta.weight`, `[G, G * D]`, of each layer."""
    heads = EvictionHeads.like(read_config(str(folder)), "always", 0)
    layers, groups, width = heads.weight.shape
    wanted = {
        f"model.layers.{layer}.self_attn.{name}": shape
        for layer in range(layers)
        for name, shape in (("A", [groups]), ("delta.weight", [groups, width]))
    }
    for name in sorted({*wanted, *tensors}):
        found, expected = tensors.get(name), wanted.get(name)
        if found is None or expected is None or list(found.shape) != expected:
            shape = "not there" if found is None else list(found.shape)
            raise SearchError(f"{model}: {name} is {shape}, expected {expected or 'no such layer'}")
        if not found.is_floating_point() or not bool(found.isfinite().all()):
            raise SearchError(f"{model}: {name} is not finite, expected numbers alone")
    with torch.no_grad():
        for layer in range(layers):
            heads.scale[layer] = tensors[f"model.layers.{layer}.self_attn.A"].float()
            heads.weight[layer] = tensors[f"model.layers.{layer}.self_attn.delta.weight"].float()
    return heads


def _plan(folder: Path, released: Released) -> PatternFile:
    """Return the plan in which every layer selects for itself."""
    description = describe_model(str(folder), released.selection)
    pattern = Pattern(FULL * description.num_layers, released.selection)
    return PatternFile(
        schema="indexcache/v1",
        model=ModelSection.of(description),
        selection=released.selection,
        pattern=pattern.roles,
        retention=pattern.retention,
        versions={"sglang_indexcache": sglang_indexcache.__version__},
        created=today()["created"],
    )
