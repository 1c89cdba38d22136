"""The kernels of token-local operators, run on CPU by Triton's interpreter; tests/gpu has their bits."""

from tests.ops.interpreted import interpreted


def test_kernels_mean_what_the_cpu_computes() -> None:
    interpreted("local_child", "183 calls agree")
