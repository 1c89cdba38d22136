"""DeepGEMM's kernels compiled ahead, on a GPU: afterwards no number of rows makes it compile."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from unified_models.ops.linear import narrow
from unified_models.warm.compiling import multiply, rows, warm
from unified_models.warm.products import Product

TOKENS = 4096
SMALL = [
    Product(512, 4096, torch.float32),
    Product(1024, 1024, torch.bfloat16),
    Product(1024, 4096, torch.bfloat16, fp8=True),
    Product(256, 4096, torch.bfloat16, fp8=True, groups=2),
]


def between(product: Product, sizes: Sequence[int]) -> None:
    """Numbers of rows that `rows` leaves out, beside those of a first step."""
    left_out = sorted({*range(1, TOKENS + 1)} - {*sizes})
    assert left_out
    multiply(product, [1, 100, *left_out])


def test_a_second_time_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor at any other number of rows; the first time each product left kernels of its own."""
    if narrow.deep_gemm_release() is None:
        pytest.skip("needs DeepGEMM")
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))

    def compiled() -> set[Path]:
        return set(tmp_path.rglob("*.cubin"))

    first = [Product(512, 4096, torch.float32)]
    warm(first, 64)
    few = compiled()
    assert few, "kernels lie elsewhere"
    warm(SMALL, TOKENS)
    many = compiled()
    assert len(many) >= len(few) + len(SMALL) - 1
    warm(SMALL, TOKENS)
    assert compiled() == many
    assert max(rows(SMALL[0], TOKENS)) == TOKENS
    warm(SMALL, TOKENS, work=between)
    assert compiled() == many
    print(f"{len(many)} kernels of {len(SMALL)} products")
