"""Checks before a model is built: the command line allows a pattern, the model takes this one, and it gets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang_indexcache.errors import IndexCacheError, ProofError
from sglang_indexcache.families.base import Family
from sglang_indexcache.model.checkpoint import Checkpoint
from sglang_indexcache.model.name import at_revision
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.proof import ProofHolder
from sglang_indexcache.serving.request import Request
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.probes import SglangSource

FOREIGN_CACHES = ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")


class PreflightError(IndexCacheError):
    """A command line that can't be combined with a pattern."""


def flag(name: str) -> str:
    """Return the flag of an attribute of SGLang's server arguments."""
    return "--" + name.replace("_", "-")


def refused_flags(refused: Mapping[str, str], arguments: Any) -> Iterator[tuple[str, str]]:
    """Yield the flags in SGLang's server arguments that are among `refused` (attributes and why), with the reason."""
    for name, reason in refused.items():
        given = getattr(arguments, name, None)
        if given is True or (given and given != 1):
            yield flag(name), reason


class Preflight:
    """The plan of an engine that serves a pattern, checked before SGLang builds anything (`engines.Plan`)."""

    serves = True

    def __init__(self, request: Request, source: SglangSource) -> None:
        self._request, self._sglang = request, source
        self._checkpoints: dict[str, Checkpoint] = {}  # checked ones
        self.proven = ProofHolder()

    @property
    def pattern(self) -> Pattern:
        """Requested pattern."""
        return self._request.pattern

    @property
    def source(self) -> str:
        """File of the pattern, as the user wrote it."""
        return self._request.source

    @property
    def family(self) -> Family:
        """Family of the model that is served.

        Raises:
            ProofError: if no configuration of it was built.
        """
        if not self._checkpoints:
            raise ProofError("SGLang built a model without a configuration that the pattern could be handed over in")
        return next(iter(self._checkpoints.values())).family

    def check(self, server_args: Any) -> None:
        """Refuse flags that S layers, or blocks of queries, can't be combined with.

        Raises:
            PreflightError: naming the flag.
        """
        pattern = self.pattern
        if getattr(server_args, "use_ray", False):
            self.require(probes.RAY, "--use-ray")
        if not pattern.shared_layers and not pattern.indexers:
            return
        if getattr(server_args, "enable_two_batch_overlap", False):
            raise PreflightError(
                "--enable-two-batch-overlap can't be combined with a pattern: its path through the layers does not "
                "carry the indices to S layers; expected one of the two"
            )
        for name in FOREIGN_CACHES:
            if getattr(server_args, name, False):
                raise PreflightError(
                    f"{flag(name)} can't be combined with a pattern: its cache keys don't carry the "
                    "pattern, so KV of another one would be restored; expected --hicache-storage-backend"
                )
        family = self.family_at(at_revision(server_args.model_path, getattr(server_args, "revision", None)))
        for given, reason in refused_flags(family.sglang.refused_flags, server_args):
            raise PreflightError(f"{given} can't be combined with a pattern: {reason}")
        for given, reason in refused_flags(family.sglang.refused_with_blocks, server_args) if pattern.indexers else ():
            raise PreflightError(f"{given} can't be combined with {pattern.indexers[0]}: {reason}")
        if getattr(server_args, "pp_size", 1) > 1:
            if family.sglang.pipeline is None:
                raise PreflightError(
                    f"--pp-size {server_args.pp_size} can't be combined with a pattern on {family.name}"
                )
            self.require(family.sglang.pipeline, f"--pp-size {server_args.pp_size}")
        if getattr(server_args, "hicache_storage_backend", None):
            self.require(probes.CACHE_KEYS, f"--hicache-storage-backend {server_args.hicache_storage_backend}")

    def schedule(self, model: str) -> tuple[Family, Pattern]:
        """Return the family of the model at a path, and the pattern for its configuration.

        Raises:
            IndexCacheError: as `family_at`.
        """
        return self.family_at(model), self.pattern

    def family_at(self, model: str) -> Family:
        """Return the family of a model, checked once for an engine, however many configurations SGLang builds of it.

        Args:
            model: folder or hub id.

        Raises:
            IndexCacheError: if the pattern does not fit the model.
        """
        if model not in self._checkpoints:
            checkpoint, request = Checkpoint.read(model), self._request
            for error in checkpoint.misfits(request.pattern, request.file, request.allow_config_mismatch):
                raise error
            self._sglang.require(checkpoint.family.sglang.serving)
            for feature in checkpoint.family.sglang.needed(request.pattern):
                self._sglang.require(feature)
            self._checkpoints[model] = checkpoint
        return self._checkpoints[model].family

    def misfit(self, model: str) -> str | None:
        """Return why weights of the checkpoint at a path can't replace those that are loaded, or `None`.

        Raises:
            IndexCacheError: if the checkpoint can't be read.
        """
        return next((str(error) for error in Checkpoint.read(model).misfits(self.pattern)), None)

    def require(self, feature: probes.Feature, flag: str) -> None:
        """Check that the installed SGLang has what a flag needs beside a pattern.

        Raises:
            PreflightError: naming the flag and what is missing.
        """
        reason = self._sglang.refusal(feature)
        if reason is not None:
            raise PreflightError(f"{flag} can't be combined with a pattern on this SGLang: {reason}")
