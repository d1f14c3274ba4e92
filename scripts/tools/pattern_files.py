"""Pattern files for tests and measurements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_indexcache import Pattern, PatternFile
from sglang_indexcache.families import describe
from sglang_indexcache.pattern_file.file import ModelSection


def pattern_file(pattern: Pattern, config: dict[str, Any], name: str = "glm") -> PatternFile:
    """Make a file with `pattern` for the model with this config.json."""
    section = ModelSection.of(describe(config, name)).model_copy(update={"num_layers": len(pattern)})
    return PatternFile(
        schema="indexcache/v1",
        model=section,
        selection=pattern.selection,
        pattern=pattern.letters,
        retention=pattern.retention,
    )


def write_pattern(pattern: Pattern, model: Path, path: Path) -> str:
    """Save a file for the model in the folder `model`; return its path."""
    pattern_file(pattern, json.loads((model / "config.json").read_text())).save(path)
    return str(path)
