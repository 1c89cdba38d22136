"""sort: pairs of tokens and experts in the order of their experts, and back."""

import pytest
import torch

from unified_models.ops.sort import by_expert
from unified_models.ops.sort.reference import by_expert as reference


@pytest.mark.parametrize(
    ("tokens", "slots", "experts"), [(1, 1, 1), (1, 6, 8), (40, 3, 5), (0, 2, 4)]
)
def test_by_expert(tokens: int, slots: int, experts: int) -> None:
    """Some experts have no pair, and pairs of one expert keep their order."""
    ids = torch.randint(0, experts, (tokens, slots))
    got = by_expert(ids, experts)
    assert [t.dtype for t in got] == 3 * [torch.int64]
    assert got.place_TK.shape == ids.shape
    assert tuple(t.flatten().tolist() for t in got) == reference(ids, experts)


def test_there_and_back() -> None:
    """Rows gathered in the order come back by the places; their gradients go backward the same way."""
    ids = torch.randint(0, 7, (30, 4))
    x = torch.randn(30, 5).requires_grad_()
    order_P, place_TK, counts_E = by_expert(ids, 7)
    rows = x[order_P // 4]
    assert torch.equal(rows[place_TK], x[:, None].expand(-1, 4, -1))
    assert torch.equal(ids.flatten()[order_P], torch.arange(7).repeat_interleave(counts_E))
    rows.sum().backward()
    assert torch.equal(x.grad, torch.full((30, 5), 4.0))
