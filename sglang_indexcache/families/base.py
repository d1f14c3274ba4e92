"""The parts of a family of models: its checkpoints, and how SGLang and transformers run them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from sglang_indexcache.families.combination import Combination
from sglang_indexcache.io.errors import ModelConfigError, PatternError
from sglang_indexcache.model.config_keys import ConfigKeys, check_unknown
from sglang_indexcache.model.layers import ModelLayers
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern.selection import PatternSelection
from sglang_indexcache.sglang.attention import CountedAttention
from sglang_indexcache.sglang.override_flag import FLAG
from sglang_indexcache.sglang.probes import LOAD_MODEL, Feature, Need

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sglang_indexcache.families.dsa.heads import HeadTrouble


class CheckpointReader(ABC):
    """A reader of checkpoint files, which describes their layers.

    Attributes:
        keys: by architecture, the keys of a config.json that the models' code reads.
        indexer_weight: the names of tensors of a layer that can select; the first group is the layer's number.
    """

    keys: ClassVar[Mapping[str, ConfigKeys]]
    indexer_weight: ClassVar[re.Pattern[str]]

    @abstractmethod
    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        """Read a parsed config.json, which names this one of `keys`; `name` is the model's for people.

        Raises:
            ModelConfigError: if a needed key is missing or wrong.
        """

    def selecting(self, model: ModelLayers, selection: PatternSelection | None) -> ModelLayers:
        """Describe a model for patterns with `selection`; `None` keeps the one that it has.

        Raises:
            PatternError: if its own indexers select.
        """
        if selection is None:
            return model
        if not model.dense:
            raise PatternError(f"{model.name} has indexers that choose; expected no selection")
        native = replace(model.native, selection=selection)
        return replace(model, native=native, index_topk=selection.tokens, first_sparse_position=selection.tokens)

    def indexer_layers(self, tensors: Iterable[str]) -> frozenset[int]:
        """Find the model layers that can select, NextN/MTP layers included, by the names of a checkpoint's tensors."""
        return frozenset(int(match[1]) for name in tensors if (match := self.indexer_weight.search(name)))

    def check_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Refuse model overrides that a config.json would be refused for.

        Raises:
            ModelConfigError: naming the key.
        """
        for key in ("architectures", "model_type"):
            if key in overrides:
                raise ModelConfigError(
                    f"{FLAG}: {key} changes which model this is; expected a file made for that model"
                )
        check_unknown(overrides, frozenset().union(*(item.known for item in self.keys.values())), FLAG)
        for item in self.keys.values():
            item.check_only(overrides, FLAG)


@dataclass(frozen=True)
class SglangAdapter(ABC):
    """An adapter that makes SGLang serve these models with a pattern, and reads back what it runs.

    A letter of a pattern stands for a *site*: a module of the model that can select. Only `ModelLayers.layers` says
    which model layer that is.

    Attributes:
        checkpoint: reads the models' files.
        serving: what SGLang must have to serve these models with a pattern, and to prove it.
        pipeline: what it must have for pipeline stages; `None` where no SGLang has them.
        variants: what it may have, for some of its flags.
        begins_every_stage: whether the first site of a pipeline stage must select, since stages hand nothing over.
        place: what messages call a site: a `layer`, or a `letter` where the model numbers its layers otherwise.
        proven_after: the function of SGLang after which `loaded` is called and the roles are read back.
        calibrated: whether a calibration server can switch patterns.
        shows_indices: whether SGLang hands what each layer selects to its capturer, so that overlap can be measured.
        refused_flags: attributes of SGLang's server arguments that can't be combined with S layers, and why.
        prompt_graphs_since: the first SGLang that captures graphs of prompts unasked; `None` if none does.
        fp8_on_blackwell: whether SGLang keeps the cache in fp8 on Blackwell GPUs unasked.
    """

    checkpoint: CheckpointReader

    serving: ClassVar[Feature]
    pipeline: ClassVar[Feature | None] = None
    variants: ClassVar[tuple[Feature, ...]] = ()
    begins_every_stage: ClassVar[bool] = False
    place: ClassVar[str] = "layer"
    proven_after: ClassVar[Need] = LOAD_MODEL
    calibrated: ClassVar[bool] = True
    shows_indices: ClassVar[bool] = True
    refused_flags: ClassVar[Mapping[str, str]] = {}
    prompt_graphs_since: ClassVar[tuple[int, int, int] | None] = (0, 5, 17)
    fp8_on_blackwell: ClassVar[bool] = True

    # -- before SGLang loads the model

    def needed(self, pattern: Pattern) -> tuple[Feature, ...]:
        """Return the features besides `serving` that a pattern needs.

        Raises:
            PatternError: if no server runs such a pattern.
        """
        pattern.check_plain(f"is not served on {self.serving.name}")
        return ()

    def refused_with(self, pattern: Pattern, arguments: Any) -> Iterator[tuple[str, str]]:
        """Yield the flags in SGLang's server arguments that some patterns can't be served with, and one line why."""
        yield from ()

    def in_backends(self, arguments: Any) -> tuple[Feature, ...]:
        """Return the features that replace methods of the attention backends that server arguments may lead to."""
        return ()

    def combinations(self) -> tuple[Combination, ...]:
        """Return the features of SGLang that concern these models alone, which launch lines are judged by."""
        return ()

    def head_troubles(self, model: ModelLayers, arguments: Any) -> Iterator[HeadTrouble]:
        """Yield why SGLang's kernels can't serve a model's heads or selections, by its arguments or a launch line."""
        yield from ()

    @abstractmethod
    def to_overrides(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        """Add what makes SGLang run `pattern` to a user's `--json-model-override-args`, if SGLang reads it there.

        Raises:
            SpellingError: if the user's overrides say something else.
            PatternError: if no server runs such a pattern.
        """

    # -- the loaded model, on one rank

    def loaded(self, runner: Any, pattern: Pattern) -> None:  # noqa: B027  (most read a configuration instead)
        """Make a `ModelRunner` run `pattern` where its configuration could not; called after `proven_after`.

        Raises:
            ProofError: if that can't be done.
        """

    def captured(self, runner: Any, pattern: Pattern) -> None:  # noqa: B027  (most run nothing of ours in a pass)
        """Check that the CUDA graphs of a `ModelRunner` were captured with `pattern`.

        Raises:
            ProofError: if not.
        """

    def attentions(self, model: Any, pattern: Pattern, draft: bool) -> Iterator[CountedAttention]:
        """Yield the attention modules whose indexers are counted in the first passes; none where that can't be done.

        No pattern says anything of a draft model.
        """
        yield from ()

    def saved(self, runner: Any) -> Mapping[str, int]:
        """Return the bytes that layers of a `ModelRunner` save or take on this rank, by their `/server_info` names."""
        return {}

    @abstractmethod
    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        """Yield the modules that select or reuse, by site; those of draft and NextN models are left out."""

    @abstractmethod
    def role(self, site: int, module: Any) -> str:
        """Read from a module of `modules` which letter of a pattern it would run.

        Raises:
            ProofError: if the module does not show it.
        """

    def selection(self, model: Any) -> PatternSelection | None:
        """Read the selection that S layers of the loaded model would attend to; `None` where indexers select."""
        return None

    @abstractmethod
    def indexer(self, module: Any) -> nn.Module | None:
        """Return the indexer of a module of `modules`, which an `F` needs loaded; `None` where there is none."""

    @abstractmethod
    def switch(self, runner: Any, pattern: Pattern) -> None:
        """Make the layers of a `ModelRunner` run `pattern` from now on."""

    @abstractmethod
    def configured(self, runner: Any) -> str:
        """Return the letters of the whole model that this rank was given last; empty if it was given something else.

        They come from the configuration where SGLang's pipeline stages read it; after `switch` it agrees with the
        modules.
        """


class TransformersAdapter(ABC):
    """An adapter that finds the indexers of a transformers model, or makes it run a pattern without them.

    Attributes:
        not_in_transformers: why transformers' model computes something else than the checkpoint; `None` if it does not.
        on_kernels: whether the project's kernels can replace transformers' attention.
    """

    not_in_transformers: ClassVar[str | None] = None
    on_kernels: ClassVar[bool] = True

    @abstractmethod
    def indexer_modules(self, model: Any) -> list[nn.Module | None]:
        """Return the modules whose `forward` gives the indices that a site attends to; `None` where there is none."""

    def selecting(
        self,
        model: Any,
        pattern: Pattern,
        observe: Callable[[int, Tensor], None] | None,
        carried: Tensor | None,
        prompt: Tensor | None,
    ) -> AbstractContextManager[None]:
        """Run a model with a pattern that has a selection inside the `with` block; for arguments see `apply_roles`.

        Raises:
            PatternError: if the pattern does not fit the model, or the model's own indexers select.
        """
        raise PatternError("pattern has a selection, but the model's own indexers choose; expected F and S alone")

    def kernels(self, model: Any) -> AbstractContextManager[None]:
        """Run a model on the project's kernels inside the `with` block; called where `on_kernels` is true.

        Raises:
            KernelInputError: if they can't run it.
        """
        from indexcache_kernels.transformers import use_kernels

        return use_kernels(model)


@dataclass(frozen=True)
class Family:
    """Models whose layers select what they attend to in the same way.

    Attributes:
        name: short, for tables.
        checkpoint: reads their files.
        sglang: makes SGLang serve them with a pattern.
        transformers: finds the indexers of transformers' models.
    """

    name: str
    checkpoint: CheckpointReader
    sglang: SglangAdapter
    transformers: TransformersAdapter
