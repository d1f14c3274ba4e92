"""The platform: SGLang's own CPU device, with torch-native attention and no kernels."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import psutil
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from sglang.srt.runtime_context import get_parallel

from dsa_cpu_platform import deepseek_v4, speculative, trtllm


class DsaCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that claims to be a device of its own kind, so that SGLang asks it instead of assuming CUDA."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # no Triton, no graphs

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("EAGLE", "NEXTN", "NGRAM")

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def post_load_model(self, model: torch.nn.Module) -> None:
        """The indexer's `weights_proj` is bf16 whatever the model's dtype; float32 runs need float32."""
        _let_data_parallel_attention_run()
        speculative.replace_all()
        if get_parallel().attn_dcp_size > 1:
            trtllm.replace_all()
        if find_spec("mooncake") is not None:
            from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

            MooncakeKVSender.supports_host_tensor_indices = False  # they are pinned, and an event is recorded
        torch.cuda.current_stream = lambda device=None: None  # where ranks of context parallelism gather keys
        if type(model).__name__ == "DeepseekV4ForCausalLM":
            deepseek_v4.replace_all(model)
            return
        for module in model.modules():
            if hasattr(module, "weights_proj") and hasattr(module, "wq_b"):
                module.weights_proj.weight.data = module.weights_proj.weight.data.to(module.wq_b.weight.dtype)


def _let_data_parallel_attention_run() -> None:
    """It pins memory, copies with Triton and gathers with CUDA operators, unless SGLang's CPU engine is on: no DSA."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    def direct(output: torch.Tensor, input: torch.Tensor, group_name: str, gather: bool) -> None:
        group = parallel_state._groups[group_name]()
        (group._all_gather_into_tensor if gather else group._reduce_scatter_tensor)(output, input)

    parallel_state.reg_all_gather_into_tensor = functools.partial(direct, gather=True)
    parallel_state.reg_reduce_scatter_tensor = functools.partial(direct, gather=False)
    group = parallel_state.GroupCoordinator
    group.reduce_scatterv = group._deterministic_reduce_scatterv  # the other one is NCCL's
    forward_batch_info._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    DeepseekSparseAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
