"""The platform: SGLang's own CPU device, with torch-native attention and no kernels."""

from __future__ import annotations

import psutil
import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class DsaCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU that claims to be a device of its own kind, so that SGLang asks it instead of assuming CUDA."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()  # no Triton, no graphs

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(psutil.virtual_memory().total)

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def post_load_model(self, model: torch.nn.Module) -> None:
        """The indexer's `weights_proj` is bf16 whatever the model's dtype; float32 runs need float32."""
        for module in model.modules():
            if hasattr(module, "weights_proj") and hasattr(module, "wq_b"):
                module.weights_proj.weight.data = module.weights_proj.weight.data.to(module.wq_b.weight.dtype)
