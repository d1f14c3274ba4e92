"""What a family of models has in common: where its letters are, and how engines are told, asked and switched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from sglang_indexcache.config_keys import ConfigKeys, check_unknown
from sglang_indexcache.errors import ModelConfigError, PatternError
from sglang_indexcache.indexers import IndexerSetting
from sglang_indexcache.model import ModelLayers
from sglang_indexcache.overrides import FLAG
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.probes import LOAD_MODEL, Feature, Need, SglangSource
from sglang_indexcache.selection import Selection

if TYPE_CHECKING:
    from torch import Tensor, nn


class Family(ABC):
    """Models whose layers choose what they attend to, in one and the same way.

    A letter of a pattern stands for a *site*, a place in the model that can choose. Which model layer that is says
    `ModelLayers.layers`, and nobody else.

    Attributes:
        name: short, for tables.
        keys: which keys of a config.json their code reads, by architecture as it stands there.
        serving: what SGLang must have for these models to be served with a pattern, and proven.
        pipeline: what it must have for pipeline stages; `None` where no SGLang has them.
        variants: what it may have, for some of its flags.
        rule: what it must have to be asked which layers would run; `None` where roles are no configuration of SGLang.
        begins_every_stage: whether the first site of a pipeline stage must choose, since stages hand nothing over.
        proven_after: what of SGLang has run when `loaded` is called and the roles are read back.
        calibrated: whether a calibration server can switch patterns.
        told: what it must have so that a calibration server can tell what queries select; `None` where none can.
        refused_flags: attributes of SGLang's server arguments that can't be combined with S layers, and why.
        blocks: what it must have for F layers that select for blocks of prompt queries; `None` where no server does.
        refused_with_blocks: as `refused_flags`, of patterns with such layers.
        not_in_transformers: why transformers' model computes something else than the checkpoint; `None` if it does not.
        on_kernels: whether the project's kernels can take the place of transformers' attention.
    """

    name: ClassVar[str]
    keys: ClassVar[Mapping[str, ConfigKeys]]
    serving: ClassVar[Feature]
    pipeline: ClassVar[Feature | None]
    variants: ClassVar[tuple[Feature, ...]] = ()
    rule: ClassVar[Feature | None]
    begins_every_stage: ClassVar[bool] = False
    proven_after: ClassVar[Need] = LOAD_MODEL
    calibrated: ClassVar[bool] = True
    told: ClassVar[Feature | None] = None
    refused_flags: ClassVar[Mapping[str, str]] = MappingProxyType({})
    blocks: ClassVar[Feature | None] = None
    refused_with_blocks: ClassVar[Mapping[str, str]] = MappingProxyType({})
    not_in_transformers: ClassVar[str | None] = None
    on_kernels: ClassVar[bool] = True

    @property
    def architectures(self) -> tuple[str, ...]:
        """As in config.json."""
        return tuple(self.keys)

    # -- the checkpoint

    @abstractmethod
    def describe(self, config: Mapping[str, Any], name: str, architecture: str) -> ModelLayers:
        """Read a parsed config.json.

        Args:
            config: its content.
            name: what people call the model.
            architecture: the one of `architectures` that it names.

        Raises:
            ModelConfigError: if a needed key is missing or wrong.
        """

    def selecting(self, model: ModelLayers, selection: Selection | None) -> ModelLayers:
        """What `describe` gave, for patterns with `selection`; where that is `None`, for its own.

        Raises:
            PatternError: if its layers choose by themselves.
        """
        if selection is None:
            return model
        if model.native.selection is None:
            raise PatternError(f"{model.name} has indexers that choose; expected no selection")
        native = replace(model.native, selection=selection)
        return replace(model, native=native, index_topk=selection.tokens, first_sparse_position=selection.tokens)

    @abstractmethod
    def indexer_layers(self, tensors: Iterable[str]) -> frozenset[int]:
        """The model layers that can choose, by the names of a checkpoint's tensors; NextN/MTP layers included."""

    # -- SGLang, before it loads

    def check_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Refuse model overrides that a config.json is refused for.

        Raises:
            ModelConfigError: naming the key.
        """
        for key in ("architectures", "model_type"):
            if key in overrides:
                raise ModelConfigError(
                    f"{FLAG}: {key} changes which model this is; expected a file made for that model"
                )
        known = [item.known for item in self.keys.values()]
        check_unknown(overrides, known[0].union(*known[1:]), FLAG)
        for item in self.keys.values():
            item.check_only({key: value for key, value in overrides.items() if key in item.only}, FLAG)

    def needed(self, pattern: Pattern) -> tuple[Feature, ...]:
        """What SGLang must have besides `serving` for a pattern: something if layers of it select in blocks.

        Raises:
            PatternError: if no server has such layers.
        """
        if self.blocks is None:
            pattern.check_plain(f"is not served on {self.name}")
            return ()
        return (self.blocks,) if pattern.indexers else ()

    @abstractmethod
    def handed_over(self, overrides: Mapping[str, Any], pattern: Pattern) -> dict[str, Any]:
        """`--json-model-override-args` of the user, with what makes SGLang run `pattern`, where it reads that there.

        Raises:
            SpellingError: if the user's say something else.
            PatternError: if no server runs such a pattern.
        """

    def would_run(self, source: SglangSource, model: str, overrides: Mapping[str, Any], letters: int) -> Pattern | None:
        """What the installed SGLang's own code says that it would run; `None` without a `rule`.

        Args:
            source: source tree of the SGLang that `import sglang` takes.
            model: folder or hub id.
            overrides: merged into the model's configuration.
            letters: how many letters a pattern has.

        Raises:
            SglangError: if it can't be asked, or refuses the model.
        """
        return None

    # -- SGLang's loaded model, on one rank

    def loaded(self, runner: Any, pattern: Pattern) -> None:  # noqa: B027  (most families are told before)
        """Make a `ModelRunner` run `pattern` where its configuration could not; called behind `proven_after`.

        Raises:
            ProofError: if that can't be done.
        """

    def captured(self, runner: Any, pattern: Pattern) -> None:  # noqa: B027  (most run nothing of ours in a pass)
        """Check what the CUDA graphs of a `ModelRunner` were captured with.

        Raises:
            ProofError: if that is not `pattern`.
        """

    @abstractmethod
    def modules(self, model: Any) -> Iterator[tuple[int, Any]]:
        """The modules that choose or reuse, by site; those of draft and NextN models are left out."""

    @abstractmethod
    def role(self, site: int, module: Any) -> str:
        """What the module of `modules` would do: a letter of patterns.

        Raises:
            ProofError: if that can't be told.
        """

    def selection(self, model: Any) -> Selection | None:
        """What S layers of the loaded model would attend to; `None` where indexers choose."""
        return None

    def indexers(self, model: Any) -> tuple[IndexerSetting, ...]:
        """The layers of the loaded model on this rank that would select in blocks, read from their indexers.

        Raises:
            ProofError: if that can't be told.
        """
        return ()

    @abstractmethod
    def indexer(self, module: Any) -> nn.Module | None:
        """The indexer of a module of `modules`, which an `F` needs loaded; `None` where there is none."""

    @abstractmethod
    def switch(self, runner: Any, pattern: Pattern) -> None:
        """Make a `ModelRunner`'s layers run `pattern` from now on."""

    def positions(self, forward_batch: Any, site: int, selected: Tensor, rows: Tensor, requests: Tensor) -> Tensor:
        """What queries of a forward pass selected, as positions in their requests, `[rows, k]`, int32, -1 for none.

        Only where SGLang has `told`.

        Args:
            forward_batch: a `ForwardBatch`.
            site: where they selected it.
            selected: what SGLang has of it, `[rows, k]`.
            rows: of the queries in the pass, `[rows]`.
            requests: numbers of their requests in it, `[rows]`.

        Raises:
            ProofError: if SGLang says it in a way that is not known.
        """
        raise NotImplementedError

    @abstractmethod
    def configured(self, runner: Any) -> str:
        """The letters of the whole model that this rank was told last; empty where it was told something else.

        Where SGLang's pipeline stages ask a configuration, it is that; after `switch` it agrees with the modules.
        """

    # -- transformers' model

    @abstractmethod
    def selectors(self, model: Any) -> list[nn.Module | None]:
        """The modules whose `forward` gives the indices that a site attends to, by site; `None` where there is none."""
