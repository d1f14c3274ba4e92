"""What the installed SGLang would really run, asked of its own code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.pattern import Pattern

_RULE = ("sglang.srt.configs.model_config", "dsa_layer_skips_topk")
_CONFIG = ("sglang.srt.utils.hf_transformers", "get_config")


class SglangError(IndexCacheError):
    """An installed SGLang that can't be asked, or that refuses the model."""


@dataclass(frozen=True)
class InstalledSglang:
    """SGLang as found on this machine."""

    version: str

    @classmethod
    def find(cls) -> InstalledSglang | None:
        """The installed SGLang, or `None`."""
        try:
            return cls(version("sglang"))
        except PackageNotFoundError:
            return None

    def effective_pattern(self, model: str, overrides: Mapping[str, Any], num_layers: int) -> Pattern:
        """The schedule that this SGLang derives for `model` under `overrides`, layer by layer.

        It builds the configuration object as a server would and asks the one function that model construction and
        KV pools ask (0.5.14 and newer).

        Raises:
            SglangError: if the functions are not there, or refuse the model.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang's imports warn of every device that is not there
            get_config, skips_topk = (self._probe(*target) for target in (_CONFIG, _RULE))
        try:
            config = get_config(model, trust_remote_code=False, model_override_args=dict(overrides))
            roles = "".join("S" if skips_topk(config, layer) else "F" for layer in range(num_layers))
        except Exception as error:  # whatever SGLang or transformers raise on a model they don't take
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise SglangError(f"SGLang {self.version} refuses {model}: {reason}") from None
        return Pattern(roles)

    def _probe(self, module: str, name: str) -> Any:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise SglangError(
                f"SGLang {self.version} has no {module}.{name}: {error}; expected 0.5.14 or newer"
            ) from None
