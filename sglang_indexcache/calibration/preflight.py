"""Before a calibration server is built: nothing that remembers an earlier pattern, and all layers F."""

from __future__ import annotations

import ipaddress
from typing import Any

from sglang_indexcache import probes
from sglang_indexcache.checkpoint import Checkpoint, weights_digest
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.families.base import Family
from sglang_indexcache.hooks import bound_arguments, give_pattern
from sglang_indexcache.model_name import at_revision
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.probes import Feature, SglangSource
from sglang_indexcache.serving.preflight import FOREIGN_CACHES, flag, refused_flags

LAUNCH_FLAGS = ("--disable-radix-cache", "--disable-cuda-graph", "--enable-fp32-lm-head")
_WANTED = {
    "disable_radix_cache": "without it, later chunks of a prompt read KV of an earlier pattern",
    "enable_fp32_lm_head": "without it, losses are rounded to bfloat16",
}
_REFUSED = {
    "speculative_algorithm": "drafts would change what is evaluated",
    "enable_two_batch_overlap": "its path through the layers does not carry the indices to S layers",
    **dict.fromkeys(("enable_hierarchical_cache", *FOREIGN_CACHES), "it keeps KV of earlier patterns"),
    "enable_hisparse": "it plans its prefetches for one pattern",
}


class CalibrationError(IndexCacheError):
    """A command line or request that calibration mode can't take."""


class Calibration:
    """Hooks before SGLang builds its model configurations, and the schedule that the server starts with."""

    def __init__(self, source: SglangSource) -> None:
        self._source = source
        self._pattern: Pattern | None = None
        self._family: Family | None = None
        self.config_sha256 = self.weights_sha256 = ""

    @property
    def pattern(self) -> Pattern:
        """The checkpoint's own schedule: all F, unless layers are locked."""
        if self._pattern is None:
            raise CalibrationError("the model is not known yet")
        return self._pattern

    @property
    def family(self) -> Family:
        """The family of the model."""
        if self._family is None:
            raise CalibrationError("the model is not known yet")
        return self._family

    def server_args(self, *args: Any, **kwargs: Any) -> None:
        """Before `ModelConfig.from_server_args`.

        Raises:
            CalibrationError: naming the flag that is missing or too many.
        """
        server_args = bound_arguments(probes.SERVER_ARGS, args, kwargs).arguments["server_args"]
        for name, reason in _WANTED.items():
            if not getattr(server_args, name, False):
                raise CalibrationError(f"calibration needs {flag(name)}: {reason}")
        for name, reason in _REFUSED.items():
            if getattr(server_args, name, None):
                raise CalibrationError(f"{flag(name)} can't be combined with calibration: {reason}")
        if getattr(server_args, "disaggregation_mode", "null") != "null":
            raise CalibrationError("--disaggregation-mode can't be combined with calibration: switch one whole server")
        if getattr(server_args, "tokenizer_worker_num", 1) > 1:
            raise CalibrationError("calibration needs --tokenizer-worker-num 1: other workers don't load plugins")
        if getattr(server_args, "enable_dp_attention", False) and not getattr(server_args, "enable_dp_lm_head", False):
            raise CalibrationError("calibration needs --enable-dp-lm-head with --enable-dp-attention: logits are huge")
        if not _is_loopback(server_args.host) and not getattr(server_args, "admin_api_key", None):
            raise CalibrationError(
                f"calibration on --host {server_args.host} needs --admin-api-key: whoever reaches it can switch the"
                " pattern"
            )

        family, _ = self._schedule(at_revision(server_args.model_path, getattr(server_args, "revision", None)))
        for given, reason in refused_flags(family.refused_flags, server_args):
            raise CalibrationError(f"{given} can't be combined with calibration: {reason}")
        if family.begins_every_stage and getattr(server_args, "pp_size", 1) > 1:
            raise CalibrationError(
                f"--pp-size {server_args.pp_size} can't be combined with calibration on {family.name}: a stage that"
                " begins with an S layer would attend to nothing that was chosen"
            )

    def model_config(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before `ModelConfig.__init__`: the checkpoint's own schedule, spelled out.

        Raises:
            IndexCacheError: if the model has no DSA attention, or the overrides give a pattern.
        """
        return give_pattern(args, kwargs, self._schedule)

    def has(self, feature: Feature | None) -> bool:
        """Whether this SGLang has what a family may ask of it."""
        return feature is not None and self._source.refusal(feature) is None

    def _schedule(self, model: str) -> tuple[Family, Pattern]:
        if self._pattern is None:
            checkpoint = Checkpoint.read(model)
            if not checkpoint.family.calibrated:
                raise CalibrationError(
                    f"{checkpoint.model.architecture} has no calibration server; expected indexcache-search without"
                    " --engine sglang"
                )
            self._source.require(checkpoint.family.serving)
            self._family = checkpoint.family
            self._pattern = Pattern.full(checkpoint.model.num_layers, checkpoint.locked)
            self.config_sha256, self.weights_sha256 = checkpoint.model.config_sha256, weights_digest(model)
        return self.family, self._pattern


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
