"""Triton's numpy interpreter as a CPU backend of Triton, so that vLLM's V2 runner starts on a machine without a GPU.

Install it before vLLM is imported; one process only.
"""

import os
from typing import Any


def install() -> None:
    """Make Triton believe in a CPU driver whose kernels the interpreter runs."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class CpuDriver(DriverBase):
        def __init__(self) -> None:
            """No library to open."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: Any) -> None:
            """There is one."""

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def map_python_to_cpp_type(self, name: str) -> str:
            return name

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cpu", 0, 1)

        def get_benchmarker(self) -> Any:
            from triton.testing import do_bench

            return do_bench

    class Entry:
        driver = CpuDriver
        compiler = None

    backends["cpu"] = Entry()
    driver.set_active(CpuDriver())
