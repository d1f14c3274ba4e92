"""Run a DSA model of transformers on the project's kernels: no [queries, keys] tensor exists.

    python examples/use_kernels.py [FOLDER OR HUB ID]

On a CUDA device the kernels are Triton's; elsewhere their definitions in PyTorch run.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM

from indexcache_kernels.transformers import use_kernels
from indexcache_search import demo

device = "cuda" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else demo.MODEL, dtype=torch.float32)
model = model.to(device).eval()
tokens = torch.randint(model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(0)).to(device)

with torch.inference_mode():
    plain = model(tokens).logits
    with use_kernels(model):
        logits = model(tokens).logits
print(f"logits differ by at most {(plain - logits).abs().max().item():.1e}")
