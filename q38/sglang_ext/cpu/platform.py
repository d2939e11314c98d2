"""The platform class that SGLang asks for what a device can do."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform
from torch.profiler import ProfilerActivity


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """A CPU without SGLang's own CPU kernels: every operator takes its plain torch path."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True  # the references keep the states that the prefix cache snapshots

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU
