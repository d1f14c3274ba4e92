"""Search the demo model for a pattern, and read what was found.

    python examples/search_demo.py [OUTPUT [OPTIONS OF indexcache-search]]

It takes about four minutes on two cores; `--num-sequences 4 --retain 3/4` is a quick look.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sglang_indexcache import PatternFile

output, *options = sys.argv[1:] or ["indexcache-demo"]
subprocess.run([sys.executable, "-m", "indexcache_search", "--output", output, *options], check=True)

file = PatternFile.load(Path(output) / "pattern.yaml")
pattern = file.as_pattern()
print(f"\n{file.model.name}: {pattern}, {len(pattern.full_layers)} of {len(pattern)} layers run their indexer")
for layer, source in enumerate(pattern.source_layers):
    if layer != source:
        print(f"layer {layer} uses the selection of layer {source}")

held_out = json.loads((Path(output) / "metrics.json").read_text())["held_out"]
for row in held_out["rows"]:
    print(f"{row['name']:30} {row['retention'] or '':>6} {row['increase']['mean']:+.4f} nats a token")
