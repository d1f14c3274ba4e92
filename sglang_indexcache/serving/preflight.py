"""Checks before a model is built: the command line allows a pattern, the model takes this one, and it gets it."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from sglang_indexcache.checkpoint.checkpoint import Checkpoint
from sglang_indexcache.families.base import Family
from sglang_indexcache.families.dsa.blocks.adapter import with_blocks
from sglang_indexcache.io.errors import IndexCacheError, PatternError, ProofError
from sglang_indexcache.io.messages import NOT_COMBINED
from sglang_indexcache.io.refusal import SHARD_FLAG, UNION_FLAG, UNREAD_FLAG
from sglang_indexcache.model.name import at_revision
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.pattern_file.pattern_name import PatternSpec
from sglang_indexcache.serving.proven import ProofHolder
from sglang_indexcache.serving.storage import unmarked
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang import variables as environment
from sglang_indexcache.sglang.asked import Asked
from sglang_indexcache.sglang.meaning import Meaning, context_ranks
from sglang_indexcache.sglang.override_flag import parse_overrides
from sglang_indexcache.sglang.probes import Feature, SglangSource

logger = logging.getLogger(__name__)

FOREIGN_CACHES = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
_REFUSED = {
    "enable_two_batch_overlap": "its path through the layers does not carry the indices to S layers; expected one of"
    " the two",
    **dict.fromkeys(
        FOREIGN_CACHES,
        "its cache keys don't carry the pattern, so KV of another one would be restored; expected"
        " --hicache-storage-backend",
    ),
}


class PreflightError(IndexCacheError):
    """A command line that can't be combined with a pattern."""


def flag(name: str) -> str:
    """Return the flag of an attribute of SGLang's server arguments."""
    return "--" + name.replace("_", "-")


def refused_flags(refused: Mapping[str, str], arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield the flags in SGLang's server arguments that are among `refused` (attributes and why), with the reason."""
    meant = Meaning(arguments)
    for name, reason in refused.items():
        given = getattr(meant, name)
        if given is True or (given and given != 1):
            yield flag(name), reason


def refusals_of(
    pattern: Pattern, family: Family, arguments: Any, shard: bool = False, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the flags and variables that `pattern` can't be served with, whatever the SGLang, and why.

    Args:
        pattern: the pattern to serve.
        family: the model's family.
        arguments: SGLang's server arguments, or a launch line.
        shard: whether indexers are shared out.
        variables: the server's environment.
    """
    if pattern.is_full and not shard:
        return
    adapter, blocks, arguments = family.sglang, with_blocks(family.sglang), Meaning(arguments)
    yield from environment.refused(variables or {})
    for given, reason in refused_flags({**_REFUSED, **adapter.refused_flags}, arguments):
        yield given, f"{given} {NOT_COMBINED}: {reason}"
    beside = {} if blocks is None else blocks.refused_beside(pattern, shard, arguments)
    for given, line in refused_flags(beside, arguments):
        yield given, f"{given} can't be combined with {line}"
    yield from adapter.refused_with(pattern, arguments)
    stages = getattr(arguments, "pp_size", None) or 1
    if stages > 1 and adapter.pipeline is None:
        yield "--pp-size", f"--pp-size {stages} {NOT_COMBINED} on {family.name}"


def storage_refusals(source: SglangSource, arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield the flag of HiCache storage whose keys would not show a pattern in this SGLang, and why.

    Args:
        source: the installed SGLang, or an unpacked one.
        arguments: SGLang's server arguments, or a launch line.
    """
    backend = getattr(arguments, "hicache_storage_backend", None)
    if not backend:
        return
    extra = getattr(arguments, "hicache_storage_backend_extra_config", None)
    problem = source.refusal(probes.CACHE_KEYS) or unmarked(source, backend, extra)
    if problem is not None:
        given = "--hicache-storage-backend"
        yield given, f"{given} {backend} {NOT_COMBINED}: {problem}"


def replacing(pattern: Pattern, family: Family, asked: Asked, arguments: Any) -> tuple[Feature, ...]:
    """Return the features that a pattern needs on a family with what is asked for, and that may replace methods.

    Args:
        pattern: the pattern to serve.
        family: the model's family.
        asked: what is asked for beside it.
        arguments: SGLang's server arguments, or a launch line.
    """
    adapter, blocks = family.sglang, with_blocks(family.sglang)
    found = [] if pattern.is_full else [adapter.serving]
    found += adapter.needed(pattern)
    if blocks is not None:
        found += [blocks.sharding] if asked.shard else []
        grouped = pattern.indexers and not asked.ungrouped
        found += [blocks.grouping] if blocks.grouping is not None and (grouped or asked.unions) else []
        found += [blocks.context] if pattern.indexers and context_ranks(arguments) > 1 else []
    return tuple(found)


def unread(source: SglangSource, features: Iterable[Feature]) -> Iterator[str]:
    """Yield a line for each feature that replaces a method whose source in this SGLang is none that was read."""
    for feature in features:
        line = source.unread(feature)
        if line is not None:
            yield f"{line}; expected one of those, or {UNREAD_FLAG}"


def unread_features(
    source: SglangSource | None, pattern: Pattern, family: Family, asked: Asked, arguments: Any
) -> list[str]:
    """Return a line for each method that an SGLang would not be served with, since nobody has read it.

    Args:
        source: the SGLang at hand; `None` without one.
        pattern: the pattern to serve.
        family: the model's family.
        asked: what is asked for beside it.
        arguments: a launch line.
    """
    if source is None or asked.allow_unread:
        return []
    try:
        features = replacing(pattern, family, asked, arguments)
    except PatternError:  # no server has such layers, which was said
        return []
    features += family.sglang.in_backends(arguments)
    return list(unread(source, (item for item in features if source.refusal(item) is None)))


class EnginePlan(ABC):
    """The plan of one engine: each of its processes has one, and a scheduler's is proven.

    Args:
        sglang: the installed one.

    Attributes:
        serves: whether it serves one pattern, rather than switching for a search.
        subject: what its flags are combined with, in refusals.
        error: class of its refusals.
        source: origin of the pattern, for people.
        asked: what the launch asks for.
        pattern: the pattern that the engine must run; known at the latest after `family_at`.
        weights_sha256: digest of the model's files, where a search asks for it; known then, too.
        selects_after: tokens up to which a prompt attends to everything; known then, too.
        index_topk: tokens (entries) that its indexers must select; known then, too.
        proven: proof of the engine in this process.
    """

    serves: ClassVar[bool]
    subject: ClassVar[str]
    error: ClassVar[type[IndexCacheError]]
    source: str
    pattern: Pattern
    selects_after = index_topk = 0
    weights_sha256 = ""
    asked = Asked()

    def __init__(self, sglang: SglangSource) -> None:
        self.sglang, self.proven = sglang, ProofHolder()
        self._family: Family | None = None

    @property
    def family(self) -> Family:
        """Family of the engine's model.

        Raises:
            ProofError: if no configuration of it was built.
        """
        if self._family is None:
            raise ProofError("SGLang built a model without a configuration that the pattern could be handed over in")
        return self._family

    @abstractmethod
    def check(self, server_args: Any) -> None:
        """Refuse flags that the engine must not have.

        Raises:
            IndexCacheError: naming the flag.
        """

    @abstractmethod
    def family_at(self, model: str) -> Family:
        """Return the family of a model that fits the plan: a folder or hub id; `pattern` is known from then on.

        Raises:
            IndexCacheError: if it does not fit.
        """

    def check_loaded(self) -> None:  # noqa: B027  (most plans have nothing to check)
        """Check, once the model is loaded, that it is the one that was read before.

        Raises:
            ModelConfigError: naming a file that changed.
        """

    def require(self, feature: Feature, flag: str) -> None:
        """Refuse a flag that needs what the installed SGLang does not have.

        Raises:
            IndexCacheError: naming the flag and what is missing.
        """
        reason = self.sglang.refusal(feature)
        if reason is not None:
            raise self.error(f"{flag} can't be combined with {self.subject} on this SGLang: {reason}")

    def require_read(self, *features: Feature) -> None:
        """Refuse an SGLang whose source of what these features replace is none that was read, unless that is allowed.

        Raises:
            IndexCacheError: naming the function.
        """
        for line in () if self.asked.allow_unread else unread(self.sglang, features):
            raise self.error(line)

    def refuse(self, refused: Mapping[str, str], server_args: Any) -> None:
        """Refuse flags that are among `refused`: attributes of SGLang's server arguments, and why.

        Raises:
            IndexCacheError: naming the flag.
        """
        for given, reason in refused_flags(refused, server_args):
            raise self.error(f"{given} can't be combined with {self.subject}: {reason}")


class Preflight(EnginePlan):
    """The plan of an engine that serves a pattern, checked before SGLang builds anything.

    Args:
        spec: the pattern; `None` for the model's own.
        asked: what else the launch asks for.
        sglang: the installed one.
    """

    serves = True
    subject = "a pattern"
    error = PreflightError

    def __init__(self, spec: PatternSpec | None, asked: Asked, sglang: SglangSource) -> None:
        super().__init__(sglang)
        self._spec, self.asked, self.source = spec, asked, "the model's own" if spec is None else spec.text
        if spec is not None:
            self.pattern = spec.known()
        self._families: dict[str, Family] = {}  # of checked models
        self._arguments: Any = None

    def check(self, server_args: Any) -> None:
        """See `EnginePlan.check`: flags that S layers, blocks of queries or shared indexers can't be combined with."""
        self._arguments = server_args
        model = at_revision(server_args.model_path, getattr(server_args, "revision", None))
        if self.asked.without_pattern:
            self.family_at(model)
        pattern = self.pattern
        if getattr(server_args, "use_ray", False):
            self.require(probes.RAY, "--use-ray")
        if pattern.is_full and not self.asked.without_pattern:
            return
        self.refuse(_REFUSED, server_args)  # before the model is read
        family = self.family_at(model)
        blocks = with_blocks(family.sglang)
        if self.asked.unions and blocks is not None:
            for given, reason in refused_flags(blocks.refused_with_unions, server_args):
                raise PreflightError(f"{given} can't be combined with {UNION_FLAG}: {reason}")
        for _, line in refusals_of(pattern, family, server_args, self.asked.shard, os.environ):
            raise PreflightError(line)
        if getattr(server_args, "pp_size", 1) > 1 and family.sglang.pipeline is not None:
            self.require(family.sglang.pipeline, f"--pp-size {server_args.pp_size}")
        for _, line in storage_refusals(self.sglang, server_args):
            raise PreflightError(line)

    def family_at(self, model: str) -> Family:
        """See `EnginePlan.family_at`; checked once for an engine, however many configurations SGLang builds of it."""
        if model not in self._families:
            checkpoint, file = Checkpoint.read(model), None if self._spec is None else self._spec.file
            if self._spec is None:
                self.pattern = checkpoint.model.native
            overrides = parse_overrides(getattr(self._arguments, "json_model_override_args", None) or "{}")
            if overrides:
                checkpoint.family.sglang.to_overrides(overrides, self.pattern)  # refuses some by name
                checkpoint = Checkpoint.read(model, overrides)  # the model that is served
            self._check_heads(checkpoint)
            for error in checkpoint.misfits(self.pattern, file, self.asked.allow_mismatch):
                raise error
            family = checkpoint.family
            self.sglang.require(family.sglang.serving, *family.sglang.needed(self.pattern))
            blocks = with_blocks(family.sglang)
            if self.asked.shard:
                if blocks is None:
                    raise PreflightError(f"{SHARD_FLAG} is not served on {family.name}; expected a DSA model")
                self.require(blocks.sharding, SHARD_FLAG)
            if blocks is not None and self.pattern.indexers and context_ranks(self._arguments) > 1:
                self.require(blocks.context, "--enable-prefill-cp")
            if self.asked.unions:
                if blocks is None or blocks.grouping is None:
                    raise PreflightError(f"{UNION_FLAG} is not served on {family.name}; expected a DSA model")
                self.require(blocks.grouping, UNION_FLAG)
            self.require_read(*replacing(self.pattern, family, self.asked, self._arguments))
            self._families[model] = family
            if self._family is None:
                self._family, self.selects_after = family, checkpoint.model.first_sparse_position
                self.index_topk = checkpoint.model.index_topk
        return self._families[model]

    def _check_heads(self, checkpoint: Checkpoint) -> None:
        for trouble in checkpoint.family.sglang.head_troubles(checkpoint.model, self._arguments):
            if trouble.certain:
                raise PreflightError(trouble.line)
            logger.warning("indexcache: %s", trouble.line)
