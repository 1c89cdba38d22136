"""Which implementation runs: one table, printed on request, and what a process must be like for its bits to be kept."""

import functools
import hashlib
import importlib.util
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from unified_models.ops.linear.narrow import deep_gemm_release
from unified_models.ops.linear.probe import NotExactError, probe

OPERATORS = (
    "activation",
    "attend",
    "attend_latent",
    "choose",
    "combine",
    "compress",
    "conv",
    "embed",
    "gated_norm",
    "grouped_linear",
    "hyper_connect",
    "linear",
    "logprob",
    "rms_norm",
    "rope",
    "router_scores",
    "scan",
    "select",
    "sort",
)
KERNELS = (
    "activation",
    "attend",
    "attend_latent",
    "choose",
    "combine",
    "compress",
    "conv",
    "gated_norm",
    "grouped_linear",
    "hyper_connect",
    "rms_norm",
    "rope",
    "router_scores",
    "scan",
    "select",
    "sort",
)
"""Operators whose forward is a kernel of their own on CUDA."""
BACKENDS = {
    "cpu": dict.fromkeys(OPERATORS, "torch"),
    "cuda": dict.fromkeys(OPERATORS, "torch, products and sums by Triton")
    | dict.fromkeys(KERNELS, "Triton")
    | {"linear": "Triton, and DeepGEMM where it is installed"},
}
"""Device type -> operator -> implementation."""


def require(device: torch.device) -> None:
    """Refuse a process whose bits could differ from another's. NotExactError gives the reason, in one line.

    Called by every context, so it costs a few attribute reads; the probe of the machine's matrix product runs once.
    """
    if device.type not in BACKENDS:
        known = ", ".join(sorted(BACKENDS))
        raise NotExactError(
            f"no exact backend for device {str(device)!r}; there is one for: {known}"
        )
    if torch.is_autocast_enabled(device.type):
        raise NotExactError(
            "autocast is on: it would round inside operators, and change bits; switch it off"
        )
    if torch.compiler.is_compiling():
        raise NotExactError(
            "torch.compile keeps float32 between fused bf16 operators, and changes bits; run eagerly"
        )
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise NotExactError("the cuda backend needs Triton: pip install triton")
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise NotExactError(
            f"torch.set_float32_matmul_precision is {precision!r}, which lets float32 products run in bf16; "
            "set it to 'highest'"
        )
    probe(device.type)


def chip(device: torch.device) -> str:
    """What torch and its libraries choose kernels by: of a CPU its capability, of a GPU its name and generation."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} sm{major}{minor}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def libraries(device: torch.device) -> dict[str, str]:
    """Package -> version, of those whose kernels run."""
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found |= {"triton": version("triton"), "cuda": str(torch.version.cuda)}
        if (release := deep_gemm_release()) is not None:
            found["deep_gemm"] = release
    return found


@functools.lru_cache(maxsize=1)
def sources() -> dict[str, str]:
    """Each file that defines the bits (operators, formats, lists) and the first 16 hex digits of its SHA-256."""
    root = Path(__file__).parent.parent
    context = [root / f"context/{name}.py" for name in ("lists", "local", "paged")]
    files = [*root.glob("ops/**/*.py"), *root.glob("formats/*.py"), *context]
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in sorted(files)
        if file.name != "reference.py"
    }
