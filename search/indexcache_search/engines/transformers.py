"""The reference engine: transformers' own DSA models, on CPU or one GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from indexcache_search.engines import measurements
from indexcache_search.engines.base import Evaluation, Objective
from indexcache_search.engines.prefix import PrefixCache, run_from_cache
from indexcache_search.engines.roles import apply_roles, dsa_attentions
from indexcache_search.errors import SearchError
from indexcache_search.tokens import TokenSet
from sglang_indexcache import DsaModel, Pattern, checkpoint
from sglang_indexcache.checkpoint import weights_digest
from sglang_indexcache.errors import one_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTIONS = ("auto", "naive", "kernels")
LOGIT_ROWS = 1024  # rows of the [rows, vocabulary] float32 logits that exist at a time: 0.6 GB for GLM-5


class TransformersEngine:
    """Evaluates patterns with transformers.

    transformers builds dense `[queries, keys]` scores and masks, so context length is bounded by memory: an indexer of
    H heads needs `4 H L^2` bytes a sequence. With more than one sequence a batch it also copies the index keys for
    every query, which is why `batch_size` 1 is the default and the fastest on CPU. The project's kernels do without,
    on a CUDA device.

    Args:
        model: a DSA model of transformers in evaluation mode.
        description: what its config.json says.
        batch_size: sequences a forward.
        prefix_cache_gb: host memory for layer outputs, so that a pattern runs from the first layer in which it differs
            from an earlier one; without room for a pattern's run of all sequences asked for, it runs in full.
        attention: `naive`, transformers' own, or `kernels`.
        weights_sha256: digest of its weights; part of a journal's identity.
    """

    def __init__(
        self,
        model: Any,
        description: DsaModel,
        batch_size: int = 1,
        prefix_cache_gb: float = 2.0,
        attention: str = "naive",
        weights_sha256: str = "",
    ) -> None:
        self.torch_model, self.weights_sha256 = model, weights_sha256
        self.model = description
        self.batch_size = batch_size
        self._cache = PrefixCache(prefix_cache_gb * 1e9)
        self.name = f"transformers {transformers.__version__}"
        device, dtype = model.device, str(model.dtype).removeprefix("torch.")
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self.settings: Mapping[str, str] = {
            "torch": torch.__version__,
            "device": kind,
            "dtype": dtype,
            "batch_size": str(batch_size),
            "attention": attention,
        }
        self._attention: Callable[[], AbstractContextManager[None]] = nullcontext
        if attention == "kernels":
            self._attention = partial(_on_kernels, model)
        self._baselines: dict[tuple[str, int], Tensor] = {}

    @classmethod
    def load(
        cls,
        model: str,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 1,
        prefix_cache_gb: float = 2.0,
        attention: str = "auto",
    ) -> TransformersEngine:
        """Load `model`, a folder or a hub id; `attention` `auto` means kernels where they run.

        Raises:
            SearchError: if it can't be found or loaded, or the device, dtype or attention is not there.
            ModelConfigError: if it has no DSA attention.
        """
        if dtype not in DTYPES:
            raise SearchError(f"--dtype is {dtype}, expected one of {', '.join(DTYPES)}")
        target = _device(device)
        attention = resolve_attention(attention, target)
        description = describe_model(model)
        loaded = load_model(model, description, DTYPES[dtype]).eval().to(target)
        if target.type == "cpu":  # where sdpa has no fused kernel for these heads, and takes a sixth longer
            loaded.set_attn_implementation("eager")
        return cls(loaded, description, batch_size, prefix_cache_gb, attention, weights_digest(model))

    def evaluate(
        self,
        patterns: Sequence[Pattern],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """See `Engine.evaluate`; one pattern after the other, those that share their first roles side by side."""
        wanted = list(range(data.num_sequences) if rows is None else rows)
        cache = None if fresh or not self._prefixes_fit(data, len(wanted)) else self._cache
        for pattern in sorted(patterns, key=lambda item: item.roles):
            began = time.monotonic()
            found: list[tuple[float, int, int, int]] = []
            with memory_error_in_one_line(
                f"--seq-len {data.seq_len} and --batch-size {self.batch_size}",
                "shorter sequences, a smaller batch, a smaller --prefix-cache-gb or a larger device",
            ):
                for start in range(0, len(wanted), self.batch_size):
                    batch = wanted[start : start + self.batch_size]
                    before = self._keep_baselines(batch, data, cache) if objective == "kl" else 0
                    hidden, layers = self._hidden(pattern, batch, data, cache)
                    for row, states in zip(batch, hidden, strict=True):
                        found.append((*self._score(states, row, data, objective), (before + layers) * data.seq_len))
            losses, correct, tokens, layer_tokens = zip(*found, strict=True)
            yield Evaluation(pattern, tuple(wanted), losses, correct, tokens, layer_tokens, time.monotonic() - began)

    def _prefixes_fit(self, data: TokenSet, sequences: int) -> bool:
        """Whether the states of one pattern's run fit into the prefix cache."""
        indices = 4 * self.model.index_topk
        width = self.torch_model.config.hidden_size * self.torch_model.dtype.itemsize + indices
        return bool(sequences * data.seq_len * self.model.num_layers * width <= self._cache.limit)

    def topk_overlap(self, data: TokenSet, rows: int) -> NDArray[np.float64]:
        """See `Engine.topk_overlap`."""
        with self._attention():
            return measurements.topk_overlap(self.torch_model, self.model, self._batches(data, 1), rows)

    def output_similarity(self, data: TokenSet) -> NDArray[np.float64]:
        """See `Engine.output_similarity`."""
        with self._attention():
            return measurements.output_similarity(self.torch_model, self.model, self._batches(data, 1))

    def _batches(self, data: TokenSet, size: int) -> list[Tensor]:
        tokens = torch.from_numpy(data.tokens.astype(np.int64))
        return [batch.to(self.torch_model.device) for batch in torch.split(tokens, size)]

    @torch.inference_mode()
    def _hidden(
        self, pattern: Pattern, rows: Sequence[int], data: TokenSet, cache: PrefixCache | None
    ) -> tuple[Tensor, int]:
        """Post-norm hidden states `[rows, seq_len, hidden]`, and how many layers ran."""
        tokens = torch.from_numpy(data.tokens[list(rows)].astype(np.int64)).to(self.torch_model.device)
        with self._attention():
            if cache is not None:
                return run_from_cache(self.torch_model, tokens, pattern, cache, f"{data.sha256} {rows}")
            with apply_roles(self.torch_model, pattern):
                return self.torch_model.model(input_ids=tokens, use_cache=False).last_hidden_state, len(pattern)

    @torch.inference_mode()
    def _score(self, hidden: Tensor, index: int, data: TokenSet, objective: Objective) -> tuple[float, int, int]:
        targets = torch.from_numpy(np.flatnonzero(data.scored[index])).to(hidden.device)
        rows = hidden[targets - 1]  # token t is predicted from what stands before it
        labels = torch.from_numpy(data.tokens[index].astype(np.int64)).to(hidden.device)[targets]
        baseline = self._baselines[data.sha256, index].to(hidden.device) if objective == "kl" else None
        loss, correct = 0.0, 0
        for start in range(0, len(targets), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            logits = self.torch_model.lm_head(rows[part]).float()
            correct += int((logits.argmax(-1) == labels[part]).sum())
            if baseline is None:
                losses = F.cross_entropy(logits, labels[part], reduction="none")
            else:
                truth = self.torch_model.lm_head(baseline[part]).float().log_softmax(-1)
                losses = (truth.exp() * (truth - logits.log_softmax(-1))).sum(-1)
            loss += losses.double().sum().item()
        return loss, correct, len(targets)

    def _keep_baselines(self, rows: Sequence[int], data: TokenSet, cache: PrefixCache | None) -> int:
        """Keep the hidden states that predict the scored tokens under the native pattern; return how many layers ran.

        In host memory they take hidden size x dtype x scored tokens: 0.4 GB for GLM-5 in bf16 and 32K tokens.
        """
        if all((data.sha256, row) in self._baselines for row in rows):
            return 0
        hidden, layers = self._hidden(self.model.native, rows, data, cache)
        for row, states in zip(rows, hidden, strict=True):
            targets = torch.from_numpy(np.flatnonzero(data.scored[row]))
            self._baselines[data.sha256, row] = states.cpu()[targets - 1]
        return layers


def load_model(model: str, description: DsaModel, dtype: torch.dtype | str) -> Any:
    """The model of transformers with all of its weights from the checkpoint.

    transformers makes up what is missing or has another name, and says so in a warning. Indexers of locked layers may
    be missing: they never run. Indexers are looked through for NaN, which top-k hides from the loss.

    Args:
        model: folder or hub id.
        description: what its config.json says.
        dtype: of the weights, or `auto` for the checkpoint's own.

    Raises:
        SearchError: if it can't be found or loaded, or a weight is missing or not a number.
    """
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, MemoryError):
        raise
    except Exception as error:  # transformers, safetensors and PyTorch each have their own
        raise SearchError(f"{model}: can't be loaded: {_one_line(error)}") from None
    locked = tuple(f"model.layers.{layer}.self_attn.indexer." for layer in description.locked)
    missing = sorted(name for name in info["missing_keys"] if not name.startswith(locked or ("\0",)))
    wrong = sorted(str(item[0] if isinstance(item, tuple) else item) for item in info["mismatched_keys"])
    for names, what in ((missing, "is not in the checkpoint"), (wrong, "has another shape in the checkpoint")):
        if names:
            more = f" ({len(names)} such weights)" if len(names) > 1 else ""
            raise SearchError(f"{model}: {names[0]} {what}{more}; expected all weights of {description.architecture}")
    for layer, attention in enumerate(dsa_attentions(loaded)):
        for name, parameter in () if attention.indexer is None else attention.indexer.named_parameters():
            if layer not in description.locked and not parameter.isfinite().all():
                raise SearchError(f"{model}: {name} of the indexer of layer {layer} is not finite")
    return loaded


def describe_model(model: str) -> DsaModel:
    """Read the config.json of a folder or hub id.

    Raises:
        ModelConfigError: if there is none, or it has no DSA attention.
    """
    return DsaModel.from_config(*checkpoint.read_config(model))


def read_config(model: str) -> PreTrainedConfig:
    """The configuration transformers makes of a folder or hub id.

    Raises:
        SearchError: if it refuses it.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(model, trust_remote_code=False)
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
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain exceptions
        raise SearchError(f"{model}: no tokenizer found, and the data is text: {_one_line(error)}") from None
    return tokenizer


@contextmanager
def memory_error_in_one_line(sizes: str, expected: str) -> Iterator[None]:
    """Say what was too large, and what would help, when memory runs out.

    Raises:
        SearchError: if it does.
    """
    try:
        yield
    except RuntimeError as error:  # of which torch.OutOfMemoryError is one; the CPU allocator raises it plain
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise SearchError(f"out of memory with {sizes}; expected {expected}") from None


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SearchError(f"--device is {name}, expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SearchError(f"--device is {name}, expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SearchError(f"--device is {name}, but PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_attention(attention: str, device: torch.device) -> str:
    """`naive` or `kernels`, whichever `auto` means on a device.

    Raises:
        SearchError: if it is neither, or kernels are asked for where they don't run.
    """
    if attention not in ATTENTIONS:
        raise SearchError(f"--attention is {attention}, expected one of {', '.join(ATTENTIONS)}")
    if attention == "naive" or (attention == "auto" and device.type != "cuda"):
        return "naive"
    if device.type != "cuda":
        raise SearchError(f"--attention kernels needs a CUDA device, found {device.type}; expected auto or naive")
    missing = "the package triton" if find_spec("triton") is None else ""
    if not missing:
        from indexcache_kernels.transformers import supported

        missing = "" if supported() else f"transformers 5.17 or newer, found {transformers.__version__}"
    if missing and attention == "kernels":
        raise SearchError(f"--attention kernels needs {missing}; expected it, auto or naive")
    return "naive" if missing else "kernels"


@contextmanager
def _on_kernels(model: Any) -> Iterator[None]:
    from indexcache_kernels.errors import KernelInputError
    from indexcache_kernels.transformers import use_kernels

    try:
        with use_kernels(model):
            yield
    except KernelInputError as error:
        raise SearchError(f"the kernels can't run this model: {error}; expected --attention naive") from None


def _one_line(error: Exception) -> str:
    return one_line(error, 300) or type(error).__name__
