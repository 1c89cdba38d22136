"""The scan's gradients by kernels, by Triton's interpreter."""

import pytest

from tests.ops.interpreted import interpreted


@pytest.mark.slow(35)
def test_gradients_are_those_of_the_recurrence_and_backward_D10() -> None:
    interpreted("scan_backward_child", "69356 values agree")
