"""Models, configurations and tokenizers of Hugging Face, all of their weights or a line that says why not."""

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
from sglang_indexcache.errors import IndexCacheError, ModelConfigError, one_line
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.base import Family
from sglang_indexcache.model import checkpoint
from sglang_indexcache.model.files import CONFIG, INDEX, ModelFiles, weight_map
from sglang_indexcache.model.name import ModelName
from sglang_indexcache.pattern.selection import Selection

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def load_model(model: str, description: ModelLayers, dtype: torch.dtype | str) -> tuple[Any, ModelFiles]:
    """The model of transformers with all of its weights from the checkpoint, and the files that it came from.

    What is digested is what runs: weights are read once, into memory of this process, so nothing that happens to their
    files later reaches the model. transformers makes up what is missing or has another name, and leaves out what it
    does not know, with a warning; here both end the run. Indexers of locked layers may be missing or too many: they
    never run. All weights are looked through for NaN, which top-k and experts hide from the loss.

    Args:
        model: folder or hub id.
        description: what its config.json says.
        dtype: what the weights are converted to, or `auto` for the checkpoint's own.

    Raises:
        SearchError: if it can't be found or loaded, or a weight is missing, unknown or not a number, or if transformers
            computes something else.
        ModelConfigError: if a file is not there, or changes meanwhile.
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
    for name, value in loaded.state_dict().items():
        if value.is_floating_point() and not never_runs(name) and not value.isfinite().all():
            raise SearchError(f"{model}: {name} is not finite; expected numbers alone")
    if describe_model(str(folder)).config_sha256 != description.config_sha256:
        raise SearchError(f"{folder / CONFIG}: changed since it was read; expected the same file to the end")
    files.check()
    return loaded, files


def model_folder(model: str) -> Path:
    """The folder of a model, a hub id's once it is downloaded.

    Raises:
        ModelConfigError: if it is no name of a model, the hub does not have it, or can't be reached.
    """
    named = ModelName.parse(model)
    if named.folder is not None:
        return named.folder
    fetch = partial(snapshot_download, named.repository, revision=named.revision)
    try:
        folder = Path(fetch(allow_patterns=["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]))
        index = folder / INDEX
        return Path(fetch(allow_patterns=sorted(set(weight_map(index).values())) if index.is_file() else [SINGLE]))
    except IndexCacheError:
        raise
    except Exception as error:  # the client has many, and a proxy more
        raise ModelConfigError(f"{model}: can't be had: {_one_line(error)}") from None


def _check_tied(model: str, config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> None:
    """Where config.json ties the head to the embeddings, a checkpoint with both has them alike.

    Raises:
        SearchError: if they differ: transformers would run both, SGLang one.
    """
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
    """Find those of `names` that are neither of an indexer that never runs nor of a NextN layer behind the last one."""
    nextn = {int(match[1]) for name in weights if ".eh_proj." in name and (match := _LAYER.search(name))}
    unknown = []
    for name in names:
        match = _LAYER.search(name)
        behind = match is not None and int(match[1]) >= layers and int(match[1]) in nextn
        if not behind and not never_runs(name):
            unknown.append(name)
    return sorted(unknown)


def describe_model(model: str, selection: Selection | None = None) -> ModelLayers:
    """Read the config.json of a folder or hub id.

    Args:
        model: folder or hub id.
        selection: of dense models, what patterns select; by default the paper's.

    Raises:
        ModelConfigError: if there is none, or it is of no known family.
        PatternError: if there is a selection, but its layers choose by themselves.
    """
    description = describe(*checkpoint.read_config(model))
    return family_of(description.architecture).checkpoint.selecting(description, selection)


def read_config(model: str) -> PreTrainedConfig:
    """The configuration transformers makes of a folder or hub id.

    Raises:
        SearchError: if it refuses it.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(**_place(model), trust_remote_code=False)
    except Exception as error:  # checks of transformers and of the hub's client, and whatever odd values run into
        raise SearchError(f"{model}: config.json is refused: {_one_line(error)}") from None
    return config


def check_seq_len(seq_len: int, config: PreTrainedConfig) -> None:
    """Check that a model was made for sequences of `seq_len` tokens.

    Raises:
        SearchError: if not.
    """
    if seq_len > config.max_position_embeddings:
        raise SearchError(f"--seq-len is {seq_len}, but the model was made for {config.max_position_embeddings} tokens")


def set_quiet() -> None:
    """Keep transformers' bars and hints out of ours."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


_RARE = "\ua66e"  # a letter of the Cyrillic alphabet that was used once


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id.

    Raises:
        SearchError: if there is none, or one that refuses some text.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_place(model), trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain exceptions
        raise SearchError(f"{model}: no tokenizer found, and the data is text: {_one_line(error)}") from None
    try:
        tokenizer.encode(_RARE, add_special_tokens=False)
    except Exception as error:
        raise SearchError(
            f"{model}: its tokenizer refuses words that it does not know, expected an unk_token that is in its"
            f" vocabulary: {_one_line(error)}"
        ) from None
    return tokenizer


def _way_out(model: str, family: Family) -> str:
    """What to do about a quantised checkpoint that transformers can't load here."""
    quantised = checkpoint.read_config(model)[0].get("quantization_config")
    if not isinstance(quantised, dict):
        return ""
    instead = "--engine sglang" if family.sglang.calibrated else "a copy that is not quantised"
    return f"; its weights are quantised ({quantised.get('quant_method')}), expected {instead}"


def _place(model: str) -> dict[str, Any]:
    """Where transformers finds a folder or hub id, at its revision."""
    named = ModelName.parse(model)
    return {"pretrained_model_name_or_path": named.repository, "revision": named.revision or "main"}


def _one_line(error: Exception) -> str:
    return one_line(error, 300) or type(error).__name__
