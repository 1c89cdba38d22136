"""The kernels of attend_pages, run on CPU by Triton's interpreter; tests/gpu/test_attend.py has their bits."""

from tests.ops.interpreted import interpreted


def test_kernels_mean_what_the_cpu_computes() -> None:
    interpreted("attend_child", "33 calls agree")
