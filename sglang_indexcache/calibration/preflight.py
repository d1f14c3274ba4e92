"""Checks before a calibration server is built: nothing remembers an earlier pattern, and all layers are F."""

from __future__ import annotations

import ipaddress
from typing import Any

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.families.base import Family
from sglang_indexcache.model.checkpoint import Checkpoint, weights_digest
from sglang_indexcache.model.files import ModelFiles, weight_files
from sglang_indexcache.model.name import ModelName, at_revision
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.preflight import FOREIGN_CACHES, flag, refused_flags
from sglang_indexcache.serving.proof import ProofHolder
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.probes import Feature, SglangSource

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

_KEYS = {
    "admin_api_key": "whoever reaches it can switch the pattern",
    "api_key": "whoever reaches it can read the other key from /server_info; one key may be both",
}


class CalibrationError(IndexCacheError):
    """A command line or request that calibration mode can't take."""


class Calibration:
    """The plan of a calibration server (`serving.engines.Plan`), with the schedule that it starts with."""

    serves = False
    source = "calibration"

    def __init__(self, source: SglangSource) -> None:
        self._sglang = source
        self._pattern: Pattern | None = None
        self._family: Family | None = None
        self._files: ModelFiles | None = None
        self.config_sha256 = self.weights_sha256 = ""
        self.proven = ProofHolder()

    @property
    def pattern(self) -> Pattern:
        """Schedule of the checkpoint: all F, unless layers are locked."""
        if self._pattern is None:
            raise CalibrationError("the model is not known yet")
        return self._pattern

    @property
    def family(self) -> Family:
        """Family of the model."""
        if self._family is None:
            raise CalibrationError("the model is not known yet")
        return self._family

    def check(self, server_args: Any) -> None:
        """Refuse flags that are missing or too many.

        Raises:
            CalibrationError: naming the flag.
        """
        if getattr(server_args, "use_ray", False):
            self.require(probes.RAY, "--use-ray")
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
        if not _is_loopback(server_args.host):
            for name, reason in _KEYS.items():
                if not getattr(server_args, name, None):
                    raise CalibrationError(f"calibration on --host {server_args.host} needs {flag(name)}: {reason}")

        family, _ = self.schedule(at_revision(server_args.model_path, getattr(server_args, "revision", None)))
        for given, reason in refused_flags(family.sglang.refused_flags, server_args):
            raise CalibrationError(f"{given} can't be combined with calibration: {reason}")
        if family.sglang.begins_every_stage and getattr(server_args, "pp_size", 1) > 1:
            raise CalibrationError(
                f"--pp-size {server_args.pp_size} can't be combined with calibration on {family.name}: a stage that"
                " begins with an S layer would attend to nothing that was chosen"
            )

    def has(self, feature: Feature | None) -> bool:
        """Return whether this SGLang has a feature that a family may need."""
        return feature is not None and self._sglang.refusal(feature) is None

    def require(self, feature: Feature, flag: str) -> None:
        """Check that this SGLang has what a flag needs beside calibration.

        Raises:
            CalibrationError: naming the flag and what is missing.
        """
        reason = self._sglang.refusal(feature)
        if reason is not None:
            raise CalibrationError(f"{flag} can't be combined with calibration on this SGLang: {reason}")

    def schedule(self, model: str) -> tuple[Family, Pattern]:
        """Return the family of the model, and the checkpoint's own schedule, spelled out.

        Raises:
            IndexCacheError: if the model can't be calibrated.
        """
        if self._pattern is None:
            checkpoint = Checkpoint.read(model)
            if not checkpoint.family.sglang.calibrated:
                raise CalibrationError(
                    f"{checkpoint.model.architecture} has no calibration server; expected indexcache-search without"
                    " --engine sglang"
                )
            self._sglang.require(checkpoint.family.sglang.serving)
            self._family = checkpoint.family
            self._pattern = Pattern.full(checkpoint.model.num_layers, checkpoint.locked)
            self.config_sha256, folder = checkpoint.model.config_sha256, ModelName.parse(model).folder
            self._files = None if folder is None else ModelFiles.read(folder, weight_files)
            self.weights_sha256 = weights_digest(model) if self._files is None else self._files.sha256
        return self.family, self._pattern

    def check_loaded(self) -> None:
        """Check, once the model is loaded, that its files are still those whose digest a search gets.

        Raises:
            ModelConfigError: naming a file that is not.
        """
        if self._files is not None:
            self._files.check()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
