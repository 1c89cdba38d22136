"""The poison works: without it, an unwritten output could pass every test of an operator."""

import pytest
import torch

from tests.ops.conftest import compare_bits

FLOATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poisoned_floats_are_nan(poisoned: None, dtype: torch.dtype) -> None:
    made = [torch.empty(3, 5, dtype=dtype), torch.empty_strided((3, 5), (1, 3), dtype=dtype)]
    made += [torch.empty_like(made[1]), made[0].new_empty(7), made[0].new_empty_strided((2,), (2,))]
    assert all(t.float().isnan().all() for t in made)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_poisoned_whole_numbers_are_neither_zero_nor_a_sentinel(
    poisoned: None, dtype: torch.dtype
) -> None:
    assert (torch.empty(9, dtype=dtype) >= 0x5B).all()


def test_poisoned_spares_what_has_no_memory(poisoned: None) -> None:
    assert torch.empty(2, device="meta").is_meta
    assert torch.empty(0).numel() == 0
    assert torch.empty(2, dtype=torch.bool).all()


def test_poisoned_ends_with_its_test() -> None:
    assert torch.empty.__name__ == "empty"


def test_threads(threads: int) -> None:
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_that_differ_by_one_unit_are_not_equal(dtype: torch.dtype) -> None:
    """Nor are the two zeros, and where nothing was compared, nothing was equal."""
    x = torch.randn(3, 5).to(dtype)
    assert compare_bits((x, x[0]), (x.clone(), x[0].clone()), "same") == 20
    near = x.clone()
    near[1, 2] = torch.nextafter(x[1, 2], torch.tensor(9, dtype=dtype))
    for other, where in ((near, r"\(1, 2\)"), (-torch.zeros(3, 5, dtype=dtype), r"\(0, 0\)")):
        first = x if other is near else torch.zeros(3, 5, dtype=dtype)
        with pytest.raises(AssertionError, match=where):
            compare_bits(first, other, "apart")
    with pytest.raises(AssertionError, match="nothing was compared"):
        compare_bits(x[:0], x[:0].clone(), "empty")
