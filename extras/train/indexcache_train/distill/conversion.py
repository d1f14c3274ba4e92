"""Write a dense checkpoint as a DSA checkpoint: the same weights, file by file, and indexers that know nothing yet."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from indexcache_search.errors import SearchError
from indexcache_search.hf.tensors import read_tensors
from indexcache_search.hf.weights import SINGLE
from indexcache_train.distill.dense_mla import DenseStart
from indexcache_train.distill.export import copy_files
from sglang_indexcache.io.atomic import write_atomically
from sglang_indexcache.io.naming import naming
from sglang_indexcache.model.files import CONFIG, INDEX, tensor_files

BODY, INDEXERS = "model-body.safetensors", "model-indexers.safetensors"
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_LATENT = "model.layers.0.self_attn.q_a_proj.weight"  # its dtype is that of the indexers


def convert(origin: Path, start: DenseStart, seed: int, folder: Path) -> None:
    """Fill `folder` with the DSA checkpoint of a dense one.

    No more than one file of the weights is in memory. NextN layers, which have no indexer, are left out. Indexers begin
    as transformers makes them: matrices normal with `initializer_range`, norms the identity.

    Args:
        origin: folder of the dense model.
        start: what it becomes.
        seed: of the indexers; each layer has its own generator, so that a layer's indexer does not depend on others.
        folder: an empty folder.

    Raises:
        SearchError: if weights are missing, or of a kind that does not train.
    """
    names = tensor_files(origin)
    if not names or not all(name.endswith(".safetensors") for name in names):
        raise SearchError(f"{origin}: has no weights in safetensors, expected {SINGLE}, or {INDEX} and its files")
    places: dict[str, str] = {}
    dtype: torch.dtype | None = None
    for name in names:
        target = (
            BODY if name == SINGLE else name
        )  # transformers reads a file of that name alone, whatever the index says
        kept, found = _copy(origin / name, folder / target, start.description.num_layers)
        places |= dict.fromkeys(kept, target)
        dtype = found or dtype
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
        raise SearchError(
            f"{origin}: {_LATENT} is {'missing' if dtype is None else dtype}, expected it in bfloat16 or float32"
        )
    made = indexers(start, seed, dtype)
    with naming(folder / INDEXERS):
        save_file(made, folder / INDEXERS, metadata={"format": "pt"})
    places |= dict.fromkeys(made, INDEXERS)
    copy_files(origin, folder)
    write_atomically(folder / INDEX, json.dumps({"metadata": {}, "weight_map": places}, indent=1) + "\n")
    write_atomically(folder / CONFIG, json.dumps(start.config, indent=2) + "\n")


def indexers(start: DenseStart, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the indexers of all layers that are F in config.json, by their names in a checkpoint.

    For each layer `wq_b.weight` `[heads x dim, q_lora_rank]`, `wk.weight` `[dim, hidden]`, `k_norm.weight` and
    `k_norm.bias` `[dim]`, `weights_proj.weight` `[heads, hidden]`.
    """
    config, size = start.pretrained_config, start.size
    made: dict[str, Tensor] = {}
    for layer in start.description.native.full_layers:
        generator = torch.Generator().manual_seed(seed * start.description.num_layers + layer)

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            drawn = torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)
            return drawn.to(dtype)

        own = {
            "wq_b.weight": normal(size.heads * size.dim, config.q_lora_rank),
            "wk.weight": normal(size.dim, config.hidden_size),
            "k_norm.weight": torch.ones(size.dim, dtype=dtype),
            "k_norm.bias": torch.zeros(size.dim, dtype=dtype),
            "weights_proj.weight": normal(size.heads, config.hidden_size),
        }
        made |= {f"model.layers.{layer}.self_attn.indexer.{name}": value for name, value in own.items()}
    return made


def _copy(source: Path, target: Path, layers: int) -> tuple[list[str], torch.dtype | None]:
    """Copy a file of weights without the layers behind the last one; also return the dtype of the latents, if there."""
    tensors = read_tensors(source).tensors
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if (match := _LAYER.match(name)) is None or int(match[1]) < layers
    }
    with naming(target):
        if len(kept) == len(tensors):
            shutil.copyfile(source, target)
        elif kept:
            save_file(kept, target, metadata={"format": "pt"})
    return list(kept), kept[_LATENT].dtype if _LATENT in kept else None
