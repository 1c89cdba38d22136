"""The Triton kernels in Triton's numpy interpreter: `TRITON_INTERPRET=1 python -m tests.ops.triton_child`.

A process of its own, since Triton decides on import. What is right here is their meaning; bits are the GPU's affair.
"""

import torch

from unified_models.ops.linear import narrow_triton
from unified_models.ops.products_triton import product
from unified_models.ops.sums_triton import row_sum, running_sum


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def main() -> None:
    torch.manual_seed(0)
    count = 0
    for B, M, N, K in ((1, 1, 1, 1), (2, 16, 64, 32), (3, 17, 65, 33), (1, 40, 16, 70)):
        a, b = torch.randn(B, M, K), torch.randn(B, N, K).transpose(1, 2)
        close(product(a, b), a.double() @ b.double())
        wide = torch.randn(B, K, M).transpose(1, 2)
        close(product(wide, b.contiguous()), wide.double() @ b.double())
        close(product(a[:1].expand(B, -1, -1), b), a[:1].double() @ b.double())
        count += 3
    assert product(torch.ones(0, 16, 8), torch.ones(0, 8, 16)).shape == (0, 16, 16)
    assert product(torch.ones(2, 3, 0), torch.ones(2, 0, 4)).eq(0).all()
    for shape in ((1, 1), (3, 6), (70, 64), (2, 3, 100), (2, 2500)):
        x = torch.randn(shape)
        close(row_sum(x), x.double().sum(-1, keepdim=True))
        close(running_sum(x), x.double().cumsum(-1))
        count += 2
    for T, N, K, dtype in (
        (1, 16, 64, "bfloat16"),
        (70, 65, 40, "bfloat16"),
        (3, 7, 272, "float8_e4m3fn"),
    ):
        x, w = torch.randn(T, K).bfloat16(), torch.randn(N, K).to(getattr(torch, dtype))
        close(narrow_triton.product(x, w), x.double() @ w.double().T)
        xs, ws = torch.rand(T, 3), torch.rand(N, 3)
        codes = [torch.randn(rows, 384).to(torch.float8_e4m3fn) for rows in (T, N)]
        wide = [
            c.double() * s.double().repeat_interleave(128, 1)
            for c, s in zip(codes, (xs, ws), strict=True)
        ]
        close(
            narrow_triton.scaled_product(codes[0].bfloat16(), xs, codes[1], ws), wide[0] @ wide[1].T
        )
        count += 2
    assert narrow_triton.product(x[:0], w).shape == (0, 7)
    print(f"{count} calls agree")


if __name__ == "__main__":
    main()
