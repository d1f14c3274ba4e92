"""`--json-model-override-args`: SGLang's flag for changes of a model's configuration."""

from __future__ import annotations

import json
from typing import Any

from sglang_indexcache.errors import SpellingError

FLAG = "--json-model-override-args"


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
