"""Search the demo model for a pattern, run the model with it, compare, and draw what was found.

    python examples/search_apply_compare.py [OUTPUT [SEQUENCES]]

It takes some three minutes on two cores; 6 sequences, one of each source, are a quick look.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from indexcache_search import apply, demo, evaluate, search

output = Path(sys.argv[1] if len(sys.argv) > 1 else "indexcache-demo")
sequences = int(sys.argv[2]) if len(sys.argv) > 2 else 32
sizes = {"seq_len": 512, "restart": False}

# Search: which layers keep their indexer, if a quarter of them may?
found = search(
    model=demo.MODEL,
    calibration=demo.CALIBRATION,
    evaluation=demo.EVALUATION,
    retain="1/4",
    num_sequences=sequences,
    num_eval_sequences=sequences,
    output=output,
    progress=True,
    **sizes,
)
pattern = found.pattern_file.as_pattern()
print(f"{pattern}: {len(pattern.full_layers)} of {len(pattern)} layers run their indexer")

# Apply: the model of transformers with this pattern, and as it was again behind the block.
model = AutoModelForCausalLM.from_pretrained(demo.MODEL).eval()
tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
inputs = tokenizer("The old house by the river " * 30, return_tensors="pt")
with torch.inference_mode():
    plain = model(**inputs).logits
    with apply(model, output / "pattern.yaml"):
        shared = model(**inputs).logits
print(f"the likeliest token is another at {(plain.argmax(-1) != shared.argmax(-1)).float().mean():.1%} of positions")

# Compare: with uniform patterns, on data that the search has not seen.
compared = evaluate(
    model=demo.MODEL,
    patterns=output / "pattern.yaml",
    evaluation=demo.EVALUATION,
    retain="1/4",
    num_sequences=sequences,
    output=output / "compared",
    progress=True,
    **sizes,
)
rows = compared.held_out.rows
for row in rows:
    print(f"{row.name:30} {row.retention or '':>6} {row.increase.mean:+.4f} nats a token")

# Plot: loss above that of the model whose layers share nothing.
figure, axes = plt.subplots(figsize=(7, 0.4 * len(rows) + 1))
axes.barh([f"{row.name} {row.retention or ''}" for row in rows], [row.increase.mean for row in rows])
axes.invert_yaxis()
axes.set_xlabel("loss, nats a token above the model itself")
figure.savefig(output / "compared.svg", bbox_inches="tight")
print(f"Wrote {output / 'pattern.yaml'}, {output / 'report.html'}, {output / 'compared.svg'}")
