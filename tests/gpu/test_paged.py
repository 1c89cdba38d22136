"""Kernels that read pages, on a device: prefill, chunks and decoding have the bits of a pack."""

from tests.ops import triton_paged_child, triton_pool_child


def test_steps_in_pages_have_the_bits_of_a_pack() -> None:
    assert triton_paged_child.main() == 30276
    assert triton_pool_child.main() == 200265
