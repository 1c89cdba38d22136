"""float32 products by parts of K in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.ops.triton_split_child`.

Their meaning, on memory that is poisoned around what they may read, and one row's bits whatever stands beside it.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from tests.conftest import poisoning
from tests.ops.conftest import compare_bits
from unified_models.ops.linear import narrow, split_triton
from unified_models.ops.linear.split_triton import product

DTYPES = (  # of x and w
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)
TILE, PART = (16, 32, 16, 4, 4), 48
"""Small ones: what a product means does not follow from their size."""


def strided(rows: int, K: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random rows within wider ones, whose other elements are NaN."""
    memory = torch.full((rows, K + 16), torch.nan, dtype=dtype)
    memory[:, :K] = torch.randn(rows, K)
    return memory[:, :K]


def close(got: Tensor, want: Tensor, off: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want, rtol=off, atol=off)


def check_values() -> int:
    """Of float64, for whole and cut parts, columns and rows, and in turns."""
    count = 0
    for (T, N, K), (x_dtype, w_dtype) in itertools.product(
        ((1, 24, 96), (17, 4, 101), (18, 40, 16), (5, 33, 1)), DTYPES
    ):
        x, w = strided(T, K, x_dtype), strided(N, K, w_dtype)
        whole = product(x, w, tile=TILE, part=PART)
        close(whole, x.double() @ w.double().T)
        turns = product(x, w, tile=TILE, part=PART, memory=1)
        compare_bits(turns, whole, "turns of one tile")
        compare_bits(product(x.float(), w.float(), tile=TILE, part=PART), whole, "as float32")
        rounded = product(x, w, torch.bfloat16, tile=TILE, part=PART)
        close(rounded, whole.double(), 2**-7)  # the interpreter cuts
        count += 4
    assert product(torch.ones(0, 8), torch.ones(3, 8)).shape == (0, 3)
    assert product(torch.ones(2, 0), torch.ones(3, 0)).eq(0).all()
    return count + 2


def check_rows() -> int:
    """A row's bits among others, next to NaN, at any place; and the order of parts."""
    x, w = strided(35, 200), strided(24, 200)
    whole, count = product(x, w, tile=TILE, part=PART), 0
    for rows, place in itertools.product((1, 2, 16, 17), (0, 5, 18)):
        part = slice(place, place + rows)
        compare_bits(product(x[part], w, tile=TILE, part=PART), whole[part], f"{rows} at {place}")
        count += 1
    dirty = x.clone()
    dirty[torch.arange(35) % 7 != 3] = torch.nan
    compare_bits(product(dirty, w, tile=TILE, part=PART)[3::7], whole[3::7], "next to NaN")
    one_by_one = [
        product(x[:, k : k + PART].contiguous(), w[:, k : k + PART].contiguous(), tile=TILE)
        for k in range(0, 200, PART)
    ]
    total = torch.zeros_like(whole)
    for part_TN in one_by_one:
        total = total + part_TN
    compare_bits(total, whole, "parts in their order")
    backwards = torch.zeros_like(whole)
    for part_TN in reversed(one_by_one):
        backwards = backwards + part_TN
    assert not torch.equal(backwards, whole), "the order of parts shows nowhere"
    return count + 2


def check_choice() -> int:
    """K alone says who multiplies: `split_triton` from LONG on."""
    called = []

    def told(*args: Any) -> Tensor:
        called.append(args)
        return product(*args)

    split_triton.product = told  # type: ignore[assignment]
    for K, cut in ((split_triton.LONG - 16, False), (split_triton.LONG, True)):
        for T in (1, 20):
            x, w = torch.randn(T, K), torch.randn(4, K)
            close(narrow.product(x, w) / K**0.5, x.double() @ w.double().T / K**0.5)
            assert bool(called) == cut, f"K {K}, {T} rows"
            called.clear()
    return 4


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoning(torch.empty)
    count = check_values() + check_rows() + check_choice()
    print(f"{count} calls agree")


if __name__ == "__main__":
    main()
