"""What the installed SGLang would really run, asked of its own rule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from sglang_indexcache.model_name import ModelName
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.probes import Feature, Need, SglangError, SglangSource

RULE = Need("srt.configs.model_config", "dsa_layer_skips_topk", ("config", "layer_id"))
CONFIG_READER = Need(
    "srt.utils.hf_transformers.config", "get_config", ("model", "trust_remote_code", "model_override_args")
)
RULE_FEATURE = Feature("check", "ask SGLang's own rule which layers would run", (RULE, CONFIG_READER), "not checked")


def effective_pattern(source: SglangSource, model: str, overrides: Mapping[str, Any], num_layers: int) -> Pattern:
    """The schedule that the installed SGLang derives for `model` under `overrides`, layer by layer.

    It builds the configuration object as a server would and asks the one function that model construction and KV
    pools ask (0.5.14 and newer).

    Args:
        source: source tree of the SGLang that `import sglang` takes.

    Raises:
        SglangError: if the functions are not there, or refuse the model.
    """
    source.require(RULE_FEATURE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's imports warn of every device that is not there
        get_config, skips_topk = _imported(CONFIG_READER), _imported(RULE)
    named = ModelName.parse(model)
    revision = {"revision": named.revision} if named.revision else {}
    try:
        config = get_config(named.repository, trust_remote_code=False, model_override_args=dict(overrides), **revision)
        roles = "".join("S" if skips_topk(config, layer) else "F" for layer in range(num_layers))
    except Exception as error:  # whatever SGLang or transformers raise on a model they don't take
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise SglangError(f"SGLang {source.version} refuses {model}: {reason}") from None
    return Pattern(roles)


def _imported(need: Need) -> Any:
    try:
        return resolve_name(f"sglang.{need.module}:{need.name}")
    except ImportError as error:
        raise SglangError(f"sglang.{need.module} can't be imported here: {error}") from None
