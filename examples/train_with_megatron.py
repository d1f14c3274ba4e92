"""Train a Megatron-Core model with DeepSeek Sparse Attention for a pattern: what to add to a pretraining script.

Megatron's scripts, such as pretrain_gpt.py of Megatron-LM, hand a function that builds the model to `pretrain`. Give
them this one instead, in a line before that call, with this file on the Python path:

    model_provider = with_indexer_loss(model_provider)

and start them with the pattern and the stage in the environment, beside Megatron's own flags for DSA:

    PATTERN=deploy/model/pattern.yaml@1/4 STAGE=sparse torchrun ... pretrain_gpt.py \
        --experimental-attention-variant dsa --dsa-indexer-loss-coeff 1.0 ...

STAGE=warmup comes first where the indexers know nothing yet: attention is dense, and they alone train. Written against
the source of megatron-core 0.16.1 and tested with a stand-in for it; we did not run it on a cluster.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, cast

from indexcache_train.distill.adapters.megatron import IndexerLoss
from sglang_indexcache.pattern_file.pattern_name import PatternSpec

_ATTACHED = ExitStack()  # for as long as the process lives


def with_indexer_loss(model_provider: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that builds a model also attach the loss, before Megatron wraps the model.

    A stage of an interleaved pipeline builds several parts; each has its own.
    """
    pattern = PatternSpec.read(os.environ["PATTERN"]).known()
    stage = cast(Literal["warmup", "sparse"], os.environ.get("STAGE", "sparse"))

    @functools.wraps(model_provider)
    def provider(*arguments: Any, **options: Any) -> Any:
        model = model_provider(*arguments, **options)
        _ATTACHED.enter_context(IndexerLoss(model, pattern, stage).attached())
        return model

    return provider
