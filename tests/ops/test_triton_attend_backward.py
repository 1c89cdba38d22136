"""The backward kernels of attend_pages, run on CPU by Triton's interpreter; tests/gpu/test_backward_attend.py has them
at real sizes."""

import pytest

from tests.ops.interpreted import interpreted


@pytest.mark.slow(40)
def test_gradients_are_those_of_one_softmax() -> None:
    interpreted("attend_backward_child", "23 calls agree")
