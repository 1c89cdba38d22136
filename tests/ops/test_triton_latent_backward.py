"""The backward kernels of attend_latent_pages, run on CPU by Triton's interpreter; tests/gpu/test_backward_latent.py
has them at real sizes."""

import pytest

from tests.ops.interpreted import interpreted


@pytest.mark.slow(60)
def test_gradients_are_those_of_one_softmax() -> None:
    interpreted("latent_backward_child", "21 calls agree")
