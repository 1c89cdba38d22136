"""The kernels of the CUDA backend, run on CPU by Triton's interpreter; tests/gpu has their bits."""

from tests.ops.interpreted import interpreted


def test_kernels_mean_what_the_cpu_computes() -> None:
    interpreted("child", "28 calls agree")
