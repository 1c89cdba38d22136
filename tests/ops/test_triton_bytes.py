"""What DeepGEMM is given: rows quantised by Triton's interpreter, and a stand-in that insists on the library's layouts;
tests/gpu has the library."""

from tests.ops.interpreted import interpreted


def test_deep_gemm_is_given_what_it_reads() -> None:
    interpreted("bytes_child", "72 calls agree")
