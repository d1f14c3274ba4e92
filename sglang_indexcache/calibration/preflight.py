"""Checks before a calibration server is built: nothing remembers an earlier pattern, and all layers are F."""

from __future__ import annotations

import ipaddress
from typing import Any

from sglang_indexcache.checkpoint.checkpoint import Checkpoint, weights_digest
from sglang_indexcache.families.base import Family
from sglang_indexcache.io.errors import IndexCacheError
from sglang_indexcache.model.files import ModelFiles, weight_files
from sglang_indexcache.model.name import ModelName, at_revision
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.preflight import FOREIGN_CACHES, EnginePlan, flag
from sglang_indexcache.sglang import probes
from sglang_indexcache.sglang.meaning import Meaning
from sglang_indexcache.sglang.override_flag import parse_overrides
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


class Calibration(EnginePlan):
    """The plan of a calibration server, with the schedule that it starts with: all F, unless layers are locked."""

    serves = False
    subject = source = "calibration"
    error = CalibrationError

    def __init__(self, sglang: SglangSource) -> None:
        super().__init__(sglang)
        self._files: ModelFiles | None = None
        self._overrides: dict[str, Any] = {}
        self.config_sha256 = self.weights_sha256 = ""

    def check(self, server_args: Any) -> None:
        """See `EnginePlan.check`: flags that are missing or too many."""
        if getattr(server_args, "use_ray", False):
            self.require(probes.RAY, "--use-ray")
        for name, reason in _WANTED.items():
            if not getattr(server_args, name, False):
                raise CalibrationError(f"calibration needs {flag(name)}: {reason}")
        self.refuse(_REFUSED, server_args)
        if getattr(server_args, "disaggregation_mode", "null") != "null":
            raise CalibrationError("--disaggregation-mode can't be combined with calibration: switch one whole server")
        if getattr(server_args, "tokenizer_worker_num", 1) > 1:
            raise CalibrationError("calibration needs --tokenizer-worker-num 1: other workers don't load plugins")
        if Meaning(server_args).enable_dp_attention and not getattr(server_args, "enable_dp_lm_head", False):
            raise CalibrationError("calibration needs --enable-dp-lm-head with --enable-dp-attention: logits are huge")
        if not _is_loopback(server_args.host):
            for name, reason in _KEYS.items():
                if not getattr(server_args, name, None):
                    raise CalibrationError(f"calibration on --host {server_args.host} needs {flag(name)}: {reason}")

        self._overrides = parse_overrides(getattr(server_args, "json_model_override_args", None) or "{}")
        family = self.family_at(at_revision(server_args.model_path, getattr(server_args, "revision", None)))
        self.refuse(family.sglang.refused_flags, server_args)
        if family.sglang.begins_every_stage and getattr(server_args, "pp_size", 1) > 1:
            raise CalibrationError(
                f"--pp-size {server_args.pp_size} can't be combined with calibration on {family.name}: a stage that"
                " begins with an S layer would attend to nothing that was chosen"
            )

    def has(self, feature: Feature | None) -> bool:
        """Return whether this SGLang has a feature that a family may need."""
        return feature is not None and self.sglang.refusal(feature) is None

    def family_at(self, model: str) -> Family:
        """See `EnginePlan.family_at`; the pattern is the checkpoint's own, spelled out."""
        if self._family is None:
            checkpoint = Checkpoint.read(model, self._overrides)  # a search of the model without them is refused
            if not checkpoint.family.sglang.calibrated:
                raise CalibrationError(
                    f"{checkpoint.model.architecture} has no calibration server; expected indexcache-search without"
                    " --engine sglang"
                )
            self.sglang.require(checkpoint.family.sglang.serving)
            self.require_read(checkpoint.family.sglang.serving)
            self._family, self.index_topk = checkpoint.family, checkpoint.model.index_topk
            self.pattern = Pattern.full(checkpoint.model.num_layers, checkpoint.locked)
            self.config_sha256, folder = checkpoint.model.config_sha256, ModelName.parse(model).folder
            self._files = None if folder is None else ModelFiles.read(folder, weight_files)
            self.weights_sha256 = weights_digest(model) if self._files is None else self._files.sha256
        return self.family

    def check_loaded(self) -> None:
        """See `EnginePlan.check_loaded`; a search gets the digest of its files."""
        if self._files is not None:
            self._files.check()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
