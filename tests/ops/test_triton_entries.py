"""Records, entries and the indexer's choice over pages, in Triton's interpreter; tests/gpu has their bits."""

from tests.ops.interpreted import interpreted


def test_kernels_mean_what_the_cpu_computes() -> None:
    interpreted("entries_child", "530348 values agree")
