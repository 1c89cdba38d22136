"""The kernels of a backward, run on CPU by Triton's interpreter; tests/gpu has their bits."""

import pytest

from tests.ops.interpreted import interpreted


@pytest.mark.slow(30)
@pytest.mark.parametrize(("child", "calls"), [("grouped", 397), ("local", 114), ("logprob", 282)])
def test_gradients_are_those_of_the_references(child: str, calls: int) -> None:
    interpreted(f"{child}_backward_child", f"{calls} calls agree")
