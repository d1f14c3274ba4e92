"""Sharding of a model's weights, gradients and optimizer state over processes with FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from indexcache_train.training.processes import Processes


def shard(model: Any, units: Sequence[nn.Module], processes: Processes) -> Any:
    """Move `model` to the devices of `processes`: whole for a single process in float32, else sharded.

    In bfloat16 a unit computes with rounded weights and inputs, also in a single process, so that one and several train
    alike. Gradients are summed in float32.

    Args:
        model: with weights in the first process; those of the others may be on the meta device.
        units: modules that are gathered as a whole before they run, inner ones first. Other modules are gathered with
            the model.
        processes: all processes; each calls this.
    """
    if not processes.shards:
        return model.to(processes.device)
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if processes.bfloat16 else MixedPrecisionPolicy()
    handed_out: set[nn.Module] = set()
    for unit in (*units, model):
        new = [module for module in unit.modules() if module not in handed_out]
        _hand_out(new, processes)
        handed_out.update(new)
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def _hand_out(modules: list[nn.Module], processes: Processes) -> None:
    """Copy the first process's weights and buffers to the device of every process."""
    there: dict[int, nn.Parameter] = {}  # by the original, since modules may share one

    def copy(tensor: Tensor) -> Tensor:
        if processes.first:
            value = tensor.detach().to(processes.device)
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=processes.device)
        processes.broadcast(value)
        return value

    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in there:
                there[id(parameter)] = nn.Parameter(copy(parameter), parameter.requires_grad)
            setattr(module, name, there[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, copy(buffer))
