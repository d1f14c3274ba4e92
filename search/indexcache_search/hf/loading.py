"""Load models, configurations and tokenizers of Hugging Face; refuse incomplete weights in one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from indexcache_search.errors import SearchError
from indexcache_search.hf.weights import SINGLE, read_weights, whole_numbers
from sglang_indexcache import ModelLayers
from sglang_indexcache.checkpoint import checkpoint
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.refused import renamed
from sglang_indexcache.io.atomic import read_json_object
from sglang_indexcache.io.errors import FileError, IndexCacheError, ModelConfigError, one_line
from sglang_indexcache.model.files import CONFIG, INDEX, ModelFiles, weight_map
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern.selection import PatternSelection
from sglang_indexcache.pattern_file.remote import quiet_hub

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def load_model(model: str, description: ModelLayers, dtype: torch.dtype | str) -> tuple[Any, ModelFiles]:
    """Load a transformers model with all weights of its checkpoint; also return its files.

    Weights are read into memory and digested in one go, so the digest describes the weights that run. transformers only
    warns about missing and unknown weights; here both end the run. Indexers of locked layers may be missing or
    superfluous, since they never run. All weights are checked for NaN, which top-k and experts hide from the loss.

    Args:
        model: folder or hub id.
        description: its layers, read from config.json.
        dtype: of the loaded weights; `auto` keeps the checkpoint's own.

    Raises:
        SearchError: if it can't be found or loaded, if a weight is missing, unknown or not finite, or if transformers
            does not implement the model.
        ModelConfigError: if a file is missing, or changes meanwhile.
    """
    family = family_of(description.architecture)
    if family.transformers.not_in_transformers is not None:
        raise SearchError(f"{model}: {family.transformers.not_in_transformers}; expected --engine sglang")
    folder = model_folder(model)
    config = read_config(str(folder))
    locked = {description.layers[letter] for letter in description.locked}

    def never_runs(name: str) -> bool:
        return bool(family.checkpoint.indexer_layers([name]) & locked)

    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        weights, files = read_weights(folder, config, whole_numbers(empty), widen=dtype is torch.float32)
        _check_tied(model, config, weights)
        loaded, info = type(empty).from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, MemoryError, IndexCacheError):
        raise
    except Exception as error:  # transformers, safetensors and PyTorch each have their own
        raise SearchError(f"{model}: can't be loaded: {_one_line(error)}{_way_out(model, family)}") from None
    unknown = _unexplained(info["unexpected_keys"], weights, never_runs, loaded.config.num_hidden_layers)
    missing = sorted(name for name in info["missing_keys"] if not never_runs(name))
    wrong = sorted(str(item[0] if isinstance(item, tuple) else item) for item in info["mismatched_keys"])
    for names, what in (
        (missing, "is not in the checkpoint"),
        (wrong, "has another shape in the checkpoint"),
        (unknown, "is in the checkpoint, and config.json has no place for it"),
    ):
        if names:
            more = f" ({len(names)} such weights)" if len(names) > 1 else ""
            wanted = f"all weights of {description.architecture}{_way_out(model, family)}"
            raise SearchError(f"{model}: {names[0]} {what}{more}; expected {wanted}")
    tensors = loaded.state_dict()
    for name, value in tensors.items():
        if not value.is_floating_point() or never_runs(name):
            continue
        if value.itemsize == 1 and not any(f"{name}_scale{end}" in tensors for end in ("", "_inv")):
            raise SearchError(f"{model}: {name} is float8 without a scale; expected {name}_scale_inv in the checkpoint")
        if not _is_finite(value):
            raise SearchError(f"{model}: {name} is not finite; expected numbers alone")
    if describe_model(str(folder)).config_sha256 != description.config_sha256:
        raise SearchError(f"{folder / CONFIG}: changed since it was read; expected the same file to the end")
    files.check()
    return loaded, files


def model_folder(model: str) -> Path:
    """Return the folder of a model; download a hub id first.

    Raises:
        ModelConfigError: if the name is invalid, or the hub can't provide the model.
    """
    named = ModelName.parse(model)
    if named.folder is not None:
        return named.folder
    fetch = partial(snapshot_download, named.repository, revision=named.revision)
    try:
        with quiet_hub():
            folder = Path(fetch(allow_patterns=["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]))
            index = folder / INDEX
            return Path(fetch(allow_patterns=sorted(set(weight_map(index).values())) if index.is_file() else [SINGLE]))
    except IndexCacheError:
        raise
    except Exception as error:  # the client has many, and a proxy more
        raise ModelConfigError(f"{model}: can't be had: {_one_line(error)}") from None


def _check_tied(model: str, config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> None:
    """Refuse tied embeddings with two different tensors, of which transformers would use both and SGLang one."""
    head, embeddings = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
    if not config.tie_word_embeddings or head is None or embeddings is None or torch.equal(head, embeddings):
        return
    raise SearchError(
        f"{model}: lm_head.weight is not model.embed_tokens.weight, and config.json says tie_word_embeddings; expected"
        " false, or one of them"
    )


def _unexplained(
    names: Iterable[str], weights: Iterable[str], never_runs: Callable[[str], bool], layers: int
) -> list[str]:
    """Return those of `names` that belong neither to an unused indexer nor to a NextN layer after the last."""

    def layer(name: str) -> int:
        match = _LAYER.search(name)
        return int(match[1]) if match else -1

    nextn = {layer(name) for name in weights if ".eh_proj." in name and layer(name) >= layers}
    return sorted(name for name in names if layer(name) not in nextn and not never_runs(name))


def describe_model(model: str, selection: PatternSelection | None = None) -> ModelLayers:
    """Return the layers of a folder or hub id, read from its config.json.

    A selection of patterns of a model without indexers is the family's by default.

    Raises:
        ModelConfigError: if there is no config.json, or its family is unknown.
        PatternError: if a selection is given for a model whose layers have their own.
    """
    description = describe(*checkpoint.read_config(model))
    return family_of(description.architecture).checkpoint.selecting(description, selection)


def read_config(model: str) -> PreTrainedConfig:
    """Return the transformers configuration of a folder or hub id.

    Raises:
        SearchError: if transformers refuses it.
    """
    given = checkpoint.read_config(model)[0]
    own = renamed(given).get("model_type")
    kind = {} if own == given.get("model_type") else {"model_type": own}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**_place(model), **kind, trust_remote_code=False)
    except Exception as error:  # errors of transformers, of the hub's client, and of odd values
        raise SearchError(f"{model}: config.json is refused: {_one_line(error)}") from None
    return config


def check_seq_len(seq_len: int, config: PreTrainedConfig) -> None:
    """Check that a model supports sequences of `seq_len` tokens.

    Raises:
        SearchError: if not.
    """
    if seq_len > config.max_position_embeddings:
        raise SearchError(f"--seq-len is {seq_len}, but the model was made for {config.max_position_embeddings} tokens")


def set_quiet() -> None:
    """Silence the progress bars and hints of transformers."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
_TOKENIZER_BYTES = 256 << 20
_RARE = "\ua66e"  # a letter of the Cyrillic alphabet that was used once


def _check_tokenizer_files(folder: Path) -> None:
    """Name the file of a tokenizer that is no JSON, and what it is instead.

    Raises:
        SearchError: if there is one.
    """
    for path in (folder / name for name in _TOKENIZER_FILES):
        try:
            if path.is_file():
                read_json_object(path, _TOKENIZER_BYTES)
        except FileError as error:
            raise SearchError(str(error)) from None


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id.

    Raises:
        SearchError: if there is none, or it refuses some text.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_place(model), trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain exceptions
        _check_tokenizer_files(Path(model))
        raise SearchError(f"{model}: no tokenizer found, and the data is text: {_one_line(error)}") from None
    try:
        tokenizer.encode(_RARE, add_special_tokens=False)
    except Exception as error:
        raise SearchError(
            f"{model}: its tokenizer refuses words that it does not know, expected an unk_token that is in its"
            f" vocabulary: {_one_line(error)}"
        ) from None
    return tokenizer


def _is_finite(value: Tensor) -> bool:
    """Return whether all numbers are finite; PyTorch can't say it of float8."""
    return bool((value.bfloat16() if value.itemsize == 1 else value).isfinite().all())


def _way_out(model: str, family: Family) -> str:
    """Suggest a remedy for a quantised checkpoint that transformers can't load here."""
    quantised = checkpoint.read_config(model)[0].get("quantization_config")
    if not isinstance(quantised, dict):
        return ""
    instead = "--engine sglang" if family.sglang.calibrated else "a copy that is not quantised"
    return f"; its weights are quantised ({quantised.get('quant_method')}), expected {instead}"


def _place(model: str) -> dict[str, Any]:
    """Return the arguments by which transformers finds a folder or hub id at its revision."""
    named = ModelName.parse(model)
    return {"pretrained_model_name_or_path": named.repository, "revision": named.revision or "main"}


def _one_line(error: Exception) -> str:
    return one_line(error, 300) or type(error).__name__
