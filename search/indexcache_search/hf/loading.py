"""Models, configurations and tokenizers of Hugging Face, all of their weights or a line that says why not."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from indexcache_search.errors import SearchError
from sglang_indexcache import SparseModel, checkpoint
from sglang_indexcache.errors import one_line
from sglang_indexcache.families import describe, family_of
from sglang_indexcache.families.base import Family
from sglang_indexcache.model_name import ModelName
from sglang_indexcache.selection import Selection


def load_model(model: str, description: SparseModel, dtype: torch.dtype | str) -> Any:
    """The model of transformers with all of its weights from the checkpoint.

    transformers makes up what is missing or has another name, and says so in a warning. Indexers of locked layers may
    be missing: they never run. Indexers are looked through for NaN, which top-k hides from the loss.

    Args:
        model: folder or hub id.
        description: what its config.json says.
        dtype: what the weights are converted to, or `auto` for the checkpoint's own.

    Raises:
        SearchError: if it can't be found or loaded, or a weight is missing or not a number, or if transformers computes
            something else.
    """
    family = family_of(description.architecture)
    if family.not_in_transformers is not None:
        raise SearchError(f"{model}: {family.not_in_transformers}; expected --engine sglang")
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and PyTorch each have their own
        raise SearchError(f"{model}: can't be loaded: {_one_line(error)}{_way_out(model, family)}") from None
    locked = {description.layers[letter] for letter in description.locked}
    missing = sorted(name for name in info["missing_keys"] if not family.indexer_layers([name]) & locked)
    wrong = sorted(str(item[0] if isinstance(item, tuple) else item) for item in info["mismatched_keys"])
    for names, what in ((missing, "is not in the checkpoint"), (wrong, "has another shape in the checkpoint")):
        if names:
            more = f" ({len(names)} such weights)" if len(names) > 1 else ""
            raise SearchError(f"{model}: {names[0]} {what}{more}; expected all weights of {description.architecture}")
    for layer, selector in zip(description.layers, family.selectors(loaded), strict=True):
        for name, parameter in () if selector is None else selector.named_parameters():
            if layer not in locked and not parameter.isfinite().all():
                raise SearchError(f"{model}: {name} of the indexer of layer {layer} is not finite")
    return loaded


def describe_model(model: str, selection: Selection | None = None) -> SparseModel:
    """Read the config.json of a folder or hub id.

    Args:
        model: folder or hub id.
        selection: of dense models, what patterns select; by default the paper's.

    Raises:
        ModelConfigError: if there is none, or it is of no known family.
        PatternError: if there is a selection, but its layers choose by themselves.
    """
    description = describe(*checkpoint.read_config(model))
    return family_of(description.architecture).selecting(description, selection)


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


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id.

    Raises:
        SearchError: if there is none.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_place(model), trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain exceptions
        raise SearchError(f"{model}: no tokenizer found, and the data is text: {_one_line(error)}") from None
    return tokenizer


def _way_out(model: str, family: Family) -> str:
    """What to do about a quantised checkpoint that transformers can't load here."""
    quantised = checkpoint.read_config(model)[0].get("quantization_config")
    if not isinstance(quantised, dict):
        return ""
    instead = "--engine sglang" if family.calibrated else "a copy that is not quantised"
    return f"; its weights are quantised ({quantised.get('quant_method')}), expected {instead}"


def _place(model: str) -> dict[str, Any]:
    """Where transformers finds a folder or hub id, at its revision."""
    named = ModelName.parse(model)
    return {"pretrained_model_name_or_path": named.repository, "revision": named.revision or "main"}


def _one_line(error: Exception) -> str:
    return one_line(error, 300) or type(error).__name__
