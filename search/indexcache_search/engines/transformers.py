"""The reference engine: transformers models, on CPU or one GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from indexcache_search.data.tokens import TokenSet
from indexcache_search.engines.base import OVERLAP, SIMILARITY
from indexcache_search.engines.measurements import output_similarity, topk_overlap
from indexcache_search.engines.prefix import PrefixCache, run_from_cache
from indexcache_search.engines.side_by_side import R, Rows, side_by_side, with_same_weights
from indexcache_search.errors import SearchError
from indexcache_search.evaluation import objectives
from indexcache_search.evaluation.losses import Evaluation
from indexcache_search.evaluation.objectives import Objective
from indexcache_search.evaluation.plan import Plan, order
from indexcache_search.hf.device import (
    DTYPES,
    LOGIT_ROWS,
    memory_error_in_one_line,
    on_kernels,
    resolve_attention,
    target_device,
)
from indexcache_search.hf.loading import describe_model, load_model
from indexcache_search.hf.roles import apply_roles
from sglang_indexcache import ModelLayers, Pattern
from sglang_indexcache.families import family_of
from sglang_indexcache.io.extensions import extensions
from sglang_indexcache.io.redaction import redacted
from sglang_indexcache.model.files import ModelFiles
from sglang_indexcache.pattern import SHARED
from sglang_indexcache.pattern.selection import PatternSelection

LONG = 2048  # tokens: longer sequences keep PyTorch's own threads busy, and need their memory twice


class TransformersEngine:
    """Engine that evaluates patterns with transformers.

    transformers builds dense `[queries, keys]` scores and masks, so memory bounds the context length: an indexer of H
    heads needs `4 H L^2` bytes per sequence. With several sequences per batch it also copies the index keys for every
    query. Therefore `batch_size` 1 is the default, and the fastest on CPU. The project's kernels, on a CUDA device,
    avoid both.

    Args:
        model: a transformers model of a family in `sglang_indexcache.families`, in evaluation mode.
        description: its layers, read from config.json.
        batch_size: sequences per forward.
        prefix_cache_gb: memory for layer outputs, so that a pattern runs from the first layer in which it differs from
            an earlier one: the GPU's where four times as much is free, else the host's. If the outputs of all requested
            sequences don't fit, patterns run in full.
        attention: `naive`, transformers' own, or `kernels`.
        files: the files it was loaded from; their digest is part of a journal's identity.
    """

    lanes = 1
    measures = frozenset({OVERLAP, SIMILARITY})

    def __init__(
        self,
        model: Any,
        description: ModelLayers,
        batch_size: int = 1,
        prefix_cache_gb: float = 2.0,
        attention: str = "naive",
        *,
        files: ModelFiles | None = None,
    ) -> None:
        self.torch_model, self.files = model, files
        self.weights_sha256 = "" if files is None else files.sha256
        self.model = description
        self.batch_size = batch_size
        self._cache = PrefixCache(prefix_cache_gb * 1e9)
        self.name = f"transformers {transformers.__version__}"
        self.settings: Mapping[str, str] = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "CPU",
            "dtype": str(model.dtype).removeprefix("torch."),
            "batch_size": str(batch_size),
            "attention": attention,
        }
        self._attention: Callable[[], AbstractContextManager[None]] = nullcontext
        if attention == "kernels":
            self._attention = partial(on_kernels, model)
        self._baselines: dict[tuple[str, int], Tensor] = {}
        self._lanes: list[Self] = []
        self._notice: Callable[[str], None] = lambda _: None
        self._told = False  # that the cache is too small

    @classmethod
    def load(
        cls,
        model: str,
        device: str = "auto",
        dtype: str = "float32",
        batch_size: int = 1,
        prefix_cache_gb: float = 2.0,
        *,
        attention: str = "auto",
        selection: PatternSelection | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> Self:
        """Load `model`, a folder or a hub id; `attention` `auto` selects the kernels where they run.

        The engine is of the class that an extension registers for the model's family, if there is one. `selection` is
        that of patterns of a model without indexers, by default the family's. `notice` is called with a line before the
        weights are read, which may take minutes, and when the prefix cache is too small to help.

        Raises:
            SearchError: if it can't be found or loaded, or the device, dtype or attention is not available.
            ModelConfigError: if its family is unknown.
        """
        if dtype not in DTYPES:
            raise SearchError(f"--dtype is {dtype}, expected one of {', '.join(DTYPES)}")
        target = target_device(device)
        resolved = resolve_attention(attention, target)
        description = describe_model(model, selection)
        family = family_of(description.architecture)
        if resolved == "kernels" and not family.transformers.on_kernels:
            if attention == "kernels":
                raise SearchError(
                    f"--engine attention=kernels does not run {description.architecture}; expected auto or naive"
                )
            resolved = "naive"
        notice(f"loading {redacted(model)}")
        loaded, files = load_model(model, description, DTYPES[dtype])
        loaded = loaded.eval().to(target)
        if target.type == "cpu":  # sdpa has no fused kernel for these heads there, and takes a sixth longer
            loaded.set_attn_implementation("eager")
        own = extensions("transformers", TransformersEngine) if cls is TransformersEngine else {}
        kind = own.get(family.name, cls)
        engine: Self = kind(loaded, description, batch_size, prefix_cache_gb, resolved, files=files)
        engine._notice = notice
        return engine

    def side_by_side(self) -> Self:
        """Run two sequences at a time from now on where that is faster, on the cores of a CPU; return this engine.

        Results are those of the threads that a lane has. It does not see what is changed at `torch_model` afterwards.
        """
        plain = type(self) is TransformersEngine and self._attention is nullcontext and self.batch_size == 1
        if plain and self.torch_model.device.type == "cpu" and torch.get_num_threads() > 1:
            for model in (self.torch_model, with_same_weights(self.torch_model)):
                self._lanes.append(copy(self))
                self._lanes[-1].torch_model, self._lanes[-1]._cache = model, PrefixCache(self._cache.limit / 2)
        return self

    def check_unchanged(self) -> None:
        """See `Engine.check_unchanged`."""
        if self.files is not None:
            self.files.check()

    def evaluate(
        self,
        patterns: Sequence[Plan],
        data: TokenSet,
        objective: Objective,
        rows: Sequence[int] | None = None,
        fresh: bool = False,
    ) -> Iterator[Evaluation]:
        """See `Engine.evaluate`; patterns that share their first roles run one after the other."""
        asked = list(range(data.num_sequences) if rows is None else rows)
        cached = not fresh and self._prefixes_fit(data, len(asked))
        for pattern in sorted(patterns, key=order):
            yield self._evaluation(pattern, data, objective, asked, cached)

    def runner(self, plan: Any, data: TokenSet, cache: PrefixCache | None) -> Callable[[Rows], tuple[Tensor, int]]:
        """Return a function that runs `plan` on some rows of `data`.

        It returns post-norm hidden states `[rows, tokens, hidden]` of the last tokens, and the layer-tokens of a row.
        """
        _check_scored(plan, data)
        return partial(self._hidden, plan, data, cache)

    def _evaluation(self, plan: Plan, data: TokenSet, objective: Objective, rows: Rows, cached: bool) -> Evaluation:
        """Evaluate a plan on `rows`, batch by batch."""

        def run(lane: TransformersEngine, batch: Rows) -> list[tuple[float, int, int, int]]:
            cache = lane._cache if cached else None
            before = lane._keep_baselines(batch, data, cache) if objective == "kl" else 0
            hidden, layer_tokens = lane.runner(plan, data, cache)(batch)
            scores = (lane._score(states, row, data, objective) for row, states in zip(batch, hidden, strict=True))
            return [(*score, before + layer_tokens) for score in scores]

        began = time.monotonic()
        with memory_error_in_one_line(
            f"--seq-len {data.seq_len} and --batch-size {self.batch_size}",
            "shorter sequences, a smaller batch, a smaller --engine prefix_cache_gb or a larger device",
        ):
            batches = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
            scores = chain.from_iterable(self._each(run, data, batches))
        losses, correct, tokens, costs = zip(*scores, strict=True)
        cost: dict[str, Any] = {"layer_tokens": costs, "seconds": time.monotonic() - began}
        return Evaluation(pattern=plan, rows=tuple(rows), losses=losses, correct=correct, tokens=tokens, **cost)

    def _each(self, work: Callable[[Self, Rows], R], data: TokenSet, batches: Sequence[Rows]) -> list[R]:
        """Return what `work` gives with each of `batches`, in their order, side by side where that is set."""
        if not self._lanes or data.seq_len > LONG:
            return [work(self, batch) for batch in batches]
        return side_by_side(self._lanes, work, batches)

    def _prefixes_fit(self, data: TokenSet, sequences: int) -> bool:
        """Return true if the states of one pattern's run fit into the prefix cache; say once if they don't."""
        config = self.torch_model.config
        streams = getattr(config, "hc_mult", 1)  # DeepSeek-V4 carries several from layer to layer
        width = streams * config.hidden_size * self.torch_model.dtype.itemsize + self._chosen_bytes(data)
        tokens = data.seq_len - self._begins(self.model.native, range(data.num_sequences), data)
        need, limit = sequences * tokens * self.model.num_layers * width, self._cache.limit
        if need > limit > 0 and not self._told:
            self._told = True
            self._notice(
                f"layer outputs of {sequences} sequences take {need / 1e9:.1f} GB, prefix_cache_gb is {limit / 1e9:g}:"
                " patterns that begin alike share nothing, each runs in full"
            )
        return bool(need <= limit)

    def _chosen_bytes(self, data: TokenSet) -> int:
        """Return the bytes of what a layer selects for one query of `data`."""
        return 4 * self.model.index_topk

    def _begins(self, pattern: Pattern, rows: Sequence[int], data: TokenSet) -> int:
        """Return the token from which on sequences run under `pattern`; before it, all patterns are alike."""
        return 0

    def matrix(self, name: str, data: TokenSet, rows: int) -> NDArray[np.float64] | None:
        """See `Engine.matrix`."""
        measure: Any = {OVERLAP: partial(topk_overlap, rows=rows), SIMILARITY: output_similarity}

        def run(lane: TransformersEngine, batch: Rows) -> Any:
            with lane._attention():
                return measure[name](lane.torch_model, lane.model, lane._tokens(data, batch))

        if name not in measure:
            return None
        return np.asarray(sum(self._each(run, data, [[row] for row in range(data.num_sequences)])) / data.num_sequences)

    def selections(self, pattern: Pattern, data: TokenSet, row: int, steps: int) -> dict[int, NDArray[np.int32]]:
        """Return the selections of the last `steps` queries, `[rows, steps, k]`, by selecting layer; -1 for none.

        They are tokens ordered by score, in one row. Every query selects from earlier tokens only, so decoding these
        tokens would select the same.
        """
        found: dict[int, NDArray[np.int32]] = {}

        def keep(letter: int, chosen: Tensor) -> None:
            if pattern[letter] != SHARED:
                found[letter] = chosen[:, -steps:].int().cpu().numpy()

        with (
            self._attention(),
            torch.inference_mode(),
            apply_roles(self.torch_model, pattern, keep, prompt=self._prompt(data, [row])),
        ):
            self.torch_model(self._tokens(data, [row]), use_cache=False, logits_to_keep=1)
        return found

    def _tokens(self, data: TokenSet, rows: Sequence[int]) -> Tensor:
        return torch.from_numpy(data.tokens[list(rows)].astype(np.int64)).to(self.torch_model.device)

    def _prompt(self, data: TokenSet, rows: Sequence[int], start: int = 0) -> Tensor | None:
        """Return which tokens from `start` on are of prompts, `[rows, tokens]`, where the data have some."""
        if data.prompt is None:
            return None
        return torch.from_numpy(data.prompt[list(rows), start:]).to(self.torch_model.device)

    @torch.inference_mode()
    def _hidden(self, pattern: Pattern, data: TokenSet, cache: PrefixCache | None, rows: Rows) -> tuple[Tensor, int]:
        """Return post-norm hidden states `[rows, tokens, hidden]` of the last tokens, and layer-tokens per row."""
        tokens, states = self._tokens(data, rows), PrefixCache(0) if cache is None else cache
        with self._attention():
            hidden, layers = run_from_cache(
                self.torch_model,
                self.model.layers,
                tokens,
                pattern,
                cache=states,
                batch=f"{data.sha256} {rows}",
                prompt=self._prompt(data, rows),
            )
        return hidden, layers * tokens.shape[1]

    @torch.inference_mode()
    def _score(self, hidden: Tensor, index: int, data: TokenSet, objective: Objective) -> tuple[float, int, int]:
        """Return the loss, and the numbers of correct and of scored tokens, of the sequence `index`."""
        rows = _predicting(hidden, index, data)
        labels = torch.from_numpy(data.tokens[index, data.scored[index]].astype(np.int64)).to(hidden.device)
        baseline = self._baselines[data.sha256, index].to(hidden.device) if objective == "kl" else None
        loss, correct = 0.0, 0
        for start in range(0, len(labels), LOGIT_ROWS):
            block = slice(start, start + LOGIT_ROWS)
            logits = self.torch_model.lm_head(rows[block]).float()
            correct += int((logits.argmax(-1) == labels[block]).sum())
            if baseline is None:
                losses = objectives.nll(logits, labels[block])
            else:
                losses = objectives.kl(logits, self.torch_model.lm_head(baseline[block]).float())
            loss += losses.double().sum().item()
        return loss, correct, len(labels)

    def _keep_baselines(self, rows: Sequence[int], data: TokenSet, cache: PrefixCache | None) -> int:
        """Keep the hidden states that predict scored tokens under the native pattern; return the layer-tokens.

        They take hidden size x dtype size x scored tokens of host memory: 0.4 GB for GLM-5 in bf16 and 32K tokens.
        """
        if all((data.sha256, row) in self._baselines for row in rows):
            return 0
        hidden, layer_tokens = self._hidden(self.model.native, data, cache, rows)
        for row, states in zip(rows, hidden, strict=True):
            self._baselines[data.sha256, row] = _predicting(states, row, data).cpu()
        return layer_tokens


def _predicting(hidden: Tensor, row: int, data: TokenSet) -> Tensor:
    """Return the states in `hidden`, those of a sequence's last tokens, that predict scored tokens."""
    before = torch.from_numpy(np.flatnonzero(data.scored[row])) - 1  # token t is predicted from the one before
    return hidden[before.to(hidden.device) - (data.seq_len - len(hidden))]


def _check_scored(pattern: Pattern, data: TokenSet) -> None:
    """Refuse to score tokens predicted by a query whose selection later queries took part in."""
    shares = pattern.indexers
    if shares and (data.prompt is None or (data.scored[:, 1:] & data.prompt[:, :-1]).any()):
        raise SearchError(f"{shares[0]}: prompt tokens count, whose selections see later ones; expected --reply")
