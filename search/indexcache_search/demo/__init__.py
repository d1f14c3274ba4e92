"""The demo model that ships with the package, its calibration and held-out data, and patterns found for it.

See `indexcache-demo/README.md` in this folder for the model card.
"""

from __future__ import annotations

from pathlib import Path

from indexcache_search.errors import DataError

FOLDER = Path(__file__).parent
MODEL = FOLDER / "indexcache-demo"
PATTERNS = tuple(str(FOLDER / "patterns" / f"{strategy}.yaml") for strategy in ("lazy", "similarity"))
TIMED_AS = "glm-5-tp8"
"""The latency table of the models that the demo's stands in for; its own layers would be too small to differ."""
RECALL_TASKS = ("kv_end", "chain", "multi", "update", "copy")
CALIBRATION = ("demo:calibration-text", "demo:calibration-recall")
EVALUATION = ("demo:text", *(f"demo:{task}" for task in RECALL_TASKS))

SEQUENCES = 48
"""Default number of held-out sequences, the same of each source; as in docs/evidence/demo.md."""


def data_file(name: str) -> Path:
    """Return the JSONL file of `demo:name`.

    Raises:
        DataError: if there is no such set.
    """
    path = FOLDER / "data" / f"{name}.jsonl"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.jsonl")))
        raise DataError(f"demo:{name}: no such set, expected one of {known}")
    return path
