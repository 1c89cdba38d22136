"""embed: rows of a table, and a gradient that adds the rows of equal ids in order."""

import pytest
import torch

from unified_models.ops.embed import embed
from unified_models.ops.embed.reference import embed as reference


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_embed_and_backward(check_gradients, make_weight, name: str) -> None:
    table = make_weight(torch.randn(11, 33).bfloat16().float(), name)
    ids_T = torch.tensor([0, 10, 3, 3, 0, 7, 3])
    leaves = {"table": table.master}
    check_gradients(
        lambda: embed(ids_T, table()), lambda table: reference(ids_T, table), leaves, terms=7
    )


def test_reference_gradient_by_finite_differences() -> None:
    table = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    ids_T = torch.tensor([1, 1, 3])
    assert torch.autograd.gradcheck(lambda t: reference(ids_T, t), (table,))


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_rows_keep_their_bits(check_rows, make_weight, name: str) -> None:
    table = make_weight(torch.randn(50, 33), name)
    ids_T = torch.randint(0, 50, (150,))
    assert check_rows(lambda ids: embed(ids, table()), ids_T) > 0


def test_dtype_is_the_formats(make_weight) -> None:
    values = torch.randn(4, 8)
    assert embed(torch.tensor([1]), make_weight(values)()).equal(values[1:2].bfloat16())
    assert embed(torch.tensor([1]), make_weight(values, "float32")()).equal(values[1:2])


def test_rows_never_looked_up_and_backward(make_weight) -> None:
    """Zero gradients, not NaN and not None."""
    table = make_weight(torch.randn(6, 4))
    embed(torch.tensor([2, 2]), table()).sum().backward()
    want = torch.zeros(6, 4)
    want[2] = 2
    assert torch.equal(table.master.grad, want)


def test_a_quantised_table_is_refused(make_weight) -> None:
    table = make_weight(torch.randn(128, 128), "fp8_ue8m0")
    table.label = "embed"
    with pytest.raises(ValueError, match=r"embed: an embedding table is .* not fp8_ue8m0"):
        embed(torch.tensor([1]), table())
