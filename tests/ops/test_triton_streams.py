"""The kernels of residual streams, rotary embedding and quantised rows, run on CPU by Triton's interpreter; tests/gpu
has their bits."""

from tests.ops.interpreted import interpreted


def test_kernels_mean_what_the_cpu_computes() -> None:
    interpreted("streams_child", "437 calls agree")
