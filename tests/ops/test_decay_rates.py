"""What the scan reads of a weight itself."""

import torch

from unified_models.ops import decay_rates
from unified_models.weight import Weight


def test_decay_rates_are_kept_without_a_master(same_bits) -> None:
    """As with a master, whose gradient they pass; another commit moves them where they lie, as a graph needs."""
    weight = Weight("heads", 8, format="float32")
    weight.assign(torch.randn(8))
    a = decay_rates(weight())
    a.sum().backward()
    assert weight.master is not None and weight.master.grad is not None
    torch.testing.assert_close(weight.master.grad, a.detach(), rtol=0, atol=0)
    weight.drop_master()
    kept = decay_rates(weight())
    same_bits(kept, a.detach(), "kept")
    assert decay_rates(weight()) is kept
    other = torch.randn(8)
    weight.assign(other)
    weight.refresh()
    same_bits(kept, -torch.exp(other), "moved")
    assert decay_rates(weight()) is kept
