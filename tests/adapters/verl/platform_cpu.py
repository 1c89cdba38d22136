"""A platform of verl's for a machine without a GPU, which verl imports itself (VERL_USE_EXTERNAL_MODULES) and
VERL_PLATFORM=cpu chooses: its own are CUDA's and Ascend's."""

from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """The host as its own device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **{
            name: getattr(torch.cpu, name)
            for name in ("current_device", "device_count", "is_available", "synchronize")
        },
        get_device_name=lambda: "CPU",
        max_memory_allocated=lambda: 0,
        max_memory_reserved=lambda: 0,
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs beside."""

    def communication_backend_name(self) -> str:
        return "gloo"
