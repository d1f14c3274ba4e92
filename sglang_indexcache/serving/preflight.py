"""Before a model is built: the command line allows a pattern, the model takes this one, and it gets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_indexcache import probes
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import IndexCacheError, ProofError
from sglang_indexcache.families.base import Family
from sglang_indexcache.hooks import bound_arguments, give_pattern
from sglang_indexcache.model_name import at_revision
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.probes import SglangSource
from sglang_indexcache.serving.request import Request

FOREIGN_CACHES = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")


class PreflightError(IndexCacheError):
    """A command line that can't be combined with a pattern."""


def flag(name: str) -> str:
    """The flag of an attribute of SGLang's server arguments."""
    return "--" + name.replace("_", "-")


def refused_flags(refused: Mapping[str, str], arguments: Any) -> Iterator[tuple[str, str]]:
    """What SGLang's server arguments ask for that is among `refused` (attributes and why), by the flag."""
    for name, reason in refused.items():
        given = getattr(arguments, name, None)
        if given is True or (given and given != 1):
            yield flag(name), reason


class Preflight:
    """Hooks before SGLang builds its model configurations."""

    def __init__(self, request: Request, source: SglangSource) -> None:
        self._request, self._source = request, source
        self._families: dict[str, Family] = {}  # of the models that were checked

    @property
    def pattern(self) -> Pattern:
        """What was asked for."""
        return self._request.pattern

    @property
    def family(self) -> Family:
        """The family of the model that is served.

        Raises:
            ProofError: if no configuration of it was built.
        """
        if not self._families:
            raise ProofError("SGLang built a model without a configuration that the pattern could be handed over in")
        return next(iter(self._families.values()))

    def server_args(self, *args: Any, **kwargs: Any) -> None:
        """Before `ModelConfig.from_server_args`: flags that S layers, or blocks of queries, can't be combined with.

        Raises:
            PreflightError: naming the flag.
        """
        arguments = bound_arguments(probes.SERVER_ARGS, args, kwargs).arguments["server_args"]
        pattern = self.pattern
        if not pattern.shared_layers and not pattern.indexers:
            return
        if getattr(arguments, "enable_two_batch_overlap", False):
            raise PreflightError(
                "--enable-two-batch-overlap can't be combined with a pattern: its path through the layers does not "
                "carry the indices to S layers; expected one of the two"
            )
        for name in FOREIGN_CACHES:
            if getattr(arguments, name, False):
                raise PreflightError(
                    f"{flag(name)} can't be combined with a pattern: its cache keys don't carry the "
                    "pattern, so KV of another one would be restored; expected --hicache-storage-backend"
                )
        family = self.family_at(at_revision(arguments.model_path, getattr(arguments, "revision", None)))
        for given, reason in refused_flags(family.refused_flags, arguments):
            raise PreflightError(f"{given} can't be combined with a pattern: {reason}")
        for given, reason in refused_flags(family.refused_with(pattern), arguments):
            raise PreflightError(f"{given} can't be combined with {pattern.indexers[0]}: {reason}")
        if getattr(arguments, "pp_size", 1) > 1:
            if family.pipeline is None:
                raise PreflightError(f"--pp-size {arguments.pp_size} can't be combined with a pattern on {family.name}")
            self._require(family.pipeline, f"--pp-size {arguments.pp_size}")
        if getattr(arguments, "hicache_storage_backend", None):
            self._require(probes.CACHE_KEYS, f"--hicache-storage-backend {arguments.hicache_storage_backend}")

    def model_config(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before `ModelConfig.__init__`: check the model, and merge the pattern into its overrides.

        Raises:
            IndexCacheError: if the pattern does not fit the model, or the overrides say something else.
        """
        return give_pattern(args, kwargs, lambda model: (self.family_at(model), self.pattern))

    def family_at(self, model: str) -> Family:
        """The family of a model, checked once, however many configurations SGLang builds of it.

        Args:
            model: folder or hub id.

        Raises:
            IndexCacheError: if the pattern does not fit the model.
        """
        if model not in self._families:
            checkpoint, request = Checkpoint.read(model), self._request
            for error in checkpoint.misfits(request.pattern, request.file, request.allow_config_mismatch):
                raise error
            self._source.require(checkpoint.family.serving)
            for feature in checkpoint.family.needed(request.pattern):
                self._source.require(feature)
            self._families[model] = checkpoint.family
        return self._families[model]

    def _require(self, feature: probes.Feature, flag: str) -> None:
        reason = self._source.refusal(feature)
        if reason is not None:
            raise PreflightError(f"{flag} can't be combined with a pattern on this SGLang: {reason}")
