"""`--json-model-override-args`: SGLang's flag for changes of a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang_indexcache.io.errors import SpellingError

FLAG = "--json-model-override-args"
_MERGED = ("rope_scaling", "rope_parameters")  # one mapping of SGLang's configuration, under both names
_OF_PATTERNS = ("index_topk_pattern", "indexer_types", "index_topk_freq", "index_skip_topk_offset", "use_index_cache")
PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Parts of a configuration of models that see images, too, which SGLang goes on to read instead."""


def parse_overrides(text: str) -> dict[str, Any]:
    """Parse the value of `--json-model-override-args`.

    Raises:
        SpellingError: if it is not a JSON object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise SpellingError(f"{FLAG} is not JSON: {text[:80]}") from None
    if not isinstance(content, dict):
        raise SpellingError(f"{FLAG} is {type(content).__name__}, expected a JSON object")
    return content


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge overrides into the content of a config.json as SGLang does.

    Keys that say which layers share are left out: they are of the pattern, and make no other model. Read: `get_config`
    and `get_hf_text_config` in srt/utils/hf_transformers of SGLang 0.5.23; in older ones a partial `rope_scaling`
    replaces all of it.

    Raises:
        SpellingError: naming a part of a configuration, which these models don't have.
    """
    part = next((key for key in PARTS if key in overrides), None)
    if part is not None:
        raise SpellingError(f"{FLAG}: {part} is no key of this model; expected its keys without {part} around them")
    found = {**config, **{key: value for key, value in overrides.items() if key not in _OF_PATTERNS}}
    for key in _MERGED:
        if isinstance(overrides.get(key), Mapping):
            saved: Mapping[str, Any] = next(
                (config[name] for name in _MERGED if isinstance(config.get(name), Mapping)), {}
            )
            found[key] = {**saved, **overrides[key]}
            found |= {name: None for name in _MERGED if name != key}
    return found
