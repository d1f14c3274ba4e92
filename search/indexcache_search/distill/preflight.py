"""Checks before anything large is loaded."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedConfig

from indexcache_search.distill import memory
from indexcache_search.distill.settings import DistillSettings, Stage, TrainingRuntime
from indexcache_search.errors import SearchError
from indexcache_search.hf.loading import check_seq_len
from indexcache_search.training.processes import Processes
from indexcache_search.training.sets import TrainingData
from sglang_indexcache import ModelLayers
from sglang_indexcache.families import family_of
from sglang_indexcache.families.dsa.checkpoint import DsaCheckpoint
from sglang_indexcache.model.checkpoint import Checkpoint


def check_model(
    model: str,
    description: ModelLayers,
    config: PreTrainedConfig,
    data: TrainingData,
    settings: DistillSettings,
    runtime: TrainingRuntime,
) -> None:
    """Refuse a model that can't be trained as requested.

    Raises:
        IndexCacheError: naming the reason.
    """
    if not isinstance(family_of(description.architecture).checkpoint, DsaCheckpoint):
        raise SearchError(f"{model}: distillation does not train {description.architecture}, expected a DSA model")
    check_seq_len(data.seq_len, config)
    settings.pattern.check_fits(description.num_layers, Checkpoint.read(model).locked)
    if getattr(config, "quantization_config", None) is not None:
        raise SearchError(f"{model}: its weights are quantised, expected a bfloat16 or float32 checkpoint")
    if config.attention_dropout:
        raise SearchError(f"{model}: attention_dropout is {config.attention_dropout}, expected 0")
    if config.model_type == "deepseek_v32" and runtime.keep_shared is False:
        raise SearchError(
            "--write shared_indexers=drop: transformers runs every indexer of a deepseek_v32 model, whatever its"
            " config.json says, and would make up the missing ones; expected keep"
        )


def computes_in_bfloat16(runtime: TrainingRuntime) -> bool:
    """Return true if the forward pass runs in bfloat16; `auto` does so on a GPU.

    Raises:
        SearchError: if the device or dtype is unknown.
    """
    if runtime.device not in ("auto", "cpu"):
        raise SearchError(f"--device is {runtime.device}, expected auto or cpu; CUDA_VISIBLE_DEVICES chooses a GPU")
    if runtime.dtype not in ("auto", "float32", "bfloat16"):
        raise SearchError(f"--dtype is {runtime.dtype}, expected auto, float32 or bfloat16")
    on_gpu = runtime.device == "auto" and torch.cuda.is_available()
    return runtime.dtype == "bfloat16" or (runtime.dtype == "auto" and on_gpu)


def check_memory(
    config: PreTrainedConfig,
    settings: DistillSettings,
    stage: Stage,
    data: TrainingData,
    runtime: TrainingRuntime,
    attention: str,
    processes: Processes,
) -> None:
    """Refuse a stage that does not fit into the free memory.

    Raises:
        SearchError: if it does not.
    """
    need = memory.estimate(
        config,
        settings.pattern,
        stage,
        seq_len=data.seq_len,
        micro_batch_size=settings.micro_batch_size,
        processes=processes.count,
        bfloat16=processes.bfloat16,
        gradient_checkpointing=runtime.gradient_checkpointing,
        kernels=attention == "kernels",
    )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory.check(need, memory.available(processes.device, local), processes.device)
