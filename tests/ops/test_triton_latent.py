"""The kernels of attend_latent_pages, run on CPU by Triton's interpreter; tests/gpu/test_latent.py has their bits."""

from tests.ops.interpreted import interpreted


def test_kernels_mean_what_the_cpu_computes() -> None:
    interpreted("latent_child", "32 calls agree, 386999 values")
