"""Write the demo model without its indexers: a dense `Glm4MoeLiteForCausalLM`, for trainings that start from one.

python -m scripts.bench.search.dense_demo --output build/dense-demo
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from indexcache_search import demo
from scripts.demo_model.glm import dense_config

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write(folder: Path) -> None:
    """Fill `folder`, which does not exist yet."""
    shutil.copytree(demo.MODEL, folder)
    weights = {name: item for name, item in load_file(folder / WEIGHTS).items() if ".indexer." not in name}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(dense_config(config), indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    write(parser.parse_args().output)
