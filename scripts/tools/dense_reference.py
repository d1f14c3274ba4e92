"""Log-probabilities by transformers of a sequence that SGLang served with a dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from indexcache_dense.hf.pages import apply_page_roles
from scripts.tools.inprocess import Served
from sglang_indexcache import Pattern


def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def distance(found: Served, expected: Tensor) -> float:
    return float((torch.tensor(found.logprobs) - expected).abs().max())


def logprobs(model: Any, ids: tuple[int, ...]) -> Tensor:
    """Return the log-probabilities of tokens 1, 2, ..."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    found: Tensor = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return found


def decoded(model: Any, pattern: Pattern, served: Served) -> Tensor:
    """Return the log-probabilities of a prompt and its reply by the reference engine."""
    read = torch.arange(len(served.ids) - 1)[None] < served.prompt
    with apply_page_roles(model, pattern, prompt=read):
        return logprobs(model, served.ids)
