"""Attention over pages in Triton's numpy interpreter: `TRITON_INTERPRET=1 python -m tests.ops.triton_attend_child`.

A process of its own, since Triton decides on import. What is right here is the kernels' meaning, and that what a step
is made of changes no bit as far as numpy's products let it show; the GPU's bits are tests/gpu/test_attend.py's affair.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from triton.runtime import interpreter

from tests.ops.attend_pages import Pack, World, compare_steps, plain, same
from tests.ops.conftest import compare_bits
from unified_models.ops.attend import _trained, attend_pages, triton

CASES = [  # query heads, groups, width, keep; dtype, codes
    (4, 2, 16, None, torch.float32, None),
    (4, 2, 16, None, torch.bfloat16, None),
    (6, 2, 64, 70, torch.bfloat16, None),
    (20, 1, 24, 5, torch.float32, torch.uint8),
    (20, 1, 24, 5, torch.bfloat16, torch.float8_e4m3fn),
]
LENGTHS, PAST = (1, 8, 0, 5, 2, 0), (150, 0, 0, 124, 62, 0)
"""Of sequences; the last is padding."""
OFF = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The interpreter cuts bfloat16 off where a GPU rounds it."""


def exact_dot(_, a, b, d, input_precision, max_num_imprecise_acc):
    """numpy's float32 products have other bits in other shapes; in float64 that does not show."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
    return interpreter.TensorHandle(product.astype(np.float32), d.dtype.scalar)


def gradients(pack: Pack) -> int:
    """Of the kernels on flat rows in one tensor: those of the lists, bit by bit."""
    grads = []
    for op in (_trained, attend_pages):
        q_THD, (k, v) = pack.q_THD.requires_grad_(), pack.pages
        rows = k.values.detach().requires_grad_()
        pages = replace(k, values=rows), replace(v, values=rows)
        how = {"scale": 0.2, "keep": pack.world.keep, "groups": pack.world.G, "most": 160}
        out = op(q_THD, *pages, pack.who, **how)
        grads.append(torch.autograd.grad(out[:-3].sum(), (q_THD, rows)))
    assert bool(grads[0][1].isfinite().all()) and grads[0][1].count_nonzero() > 0
    return compare_bits(*grads, "gradients")


def main() -> None:
    torch.manual_seed(0)
    interpreter.InterpreterBuilder.create_dot = exact_dot
    kernels, calls, values = partial(triton.attend, split=128), 0, 0
    totals = tuple(p + n for p, n in zip(PAST, LENGTHS, strict=True))
    for H, G, D, keep, dtype, codes in CASES:
        pack = Pack(World(totals, H, G, D, keep, dtype, codes), LENGTHS, PAST, padding=3)
        whole, off = pack.run(kernels), OFF[dtype]
        torch.testing.assert_close(whole, pack.run(attend_pages), rtol=off, atol=off)
        torch.testing.assert_close(whole[:-3].double(), plain(pack), rtol=off, atol=off)
        assert whole[-3:].eq(0).all()
        for tile in (2, 64 // (H // G)):
            values += same(pack.run(kernels, tile=tile), whole, f"tiles of {tile}")
        values += same(replace(pack, per_page=None).run(kernels, tile=2), whole, "flat")
        values += same(replace(pack, per_page=64, most=999).run(kernels), whole, "other pages")
        values += same(pack.run(kernels, memory=1), whole, "a tile at a time")
        values += compare_steps(kernels, pack, whole)
        calls += 6
        if codes is None:
            values += gradients(replace(pack, per_page=None))
            calls += 1
    assert values > 0
    print(f"{calls} calls agree")


if __name__ == "__main__":
    main()
