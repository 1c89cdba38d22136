"""Latent attention over pages in Triton's numpy interpreter: `TRITON_INTERPRET=1 python -m
tests.ops.triton_latent_child`.

A process of its own, since Triton decides on import. What is right here is the kernels' meaning, and that what a step
is made of changes no bit as far as numpy's products let it show; the GPU's bits are tests/gpu/test_latent.py's affair.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.ops.conftest import compare_bits
from tests.ops.latent_pages import Pack, World, compare_steps, plain
from unified_models.ops.attend_latent import _rerun, attend_latent_pages, triton
from unified_models.ops.pages import Pages

LENGTHS, PAST = (1, 2, 0, 2, 0), (130, 0, 0, 62, 0)
"""Of sequences; the last is padding."""
TOTALS = tuple(p + n for p, n in zip(PAST, LENGTHS, strict=True))
CASES = [  # heads, width, keep, stride, picks; dtype, rope
    (4, 20, 16, 2, 0, torch.float32, 0),
    (3, 48, 70, 2, 40, torch.float32, 0),
    (4, 24, 16, 2, 0, torch.bfloat16, 0),
    (66, 80, 70, 1, 68, torch.bfloat16, 16),
    (2, 192, 5, 4, 3, torch.bfloat16, 64),  # records of 259 bytes
    (4, 20, 16, 0, 0, torch.float32, 0),
]
OFF = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""The interpreter cuts bfloat16 off where a GPU rounds it."""


def exact_dot(_, a, b, d, input_precision, max_num_imprecise_acc):
    """numpy's float32 products have other bits in other shapes; in float64 that does not show."""
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
    return interpreter.TensorHandle(product.astype(np.float32), d.dtype.scalar)


def kernels(pack: Pack, **how: Any) -> Tensor:
    """The kernels' answer in small splits."""
    return pack.run(triton.attend_latent, split=64, rope=pack.told().get("rope", 0), **how)


def gradients(pack: Pack) -> int:
    """Of the kernels on flat rows: those of the lists, bit by bit."""
    grads = []

    def trained(q_THD: Tensor, window: Pages, who: Any, **how: Any) -> Tensor:
        sinks_H, pool = how.pop("sinks_H"), how.pop("pool")
        tensors = (q_THD, window.values, None if pool is None else pool.values, sinks_H)
        return _rerun(tensors, window, pool, who, how | {"rope": 0})

    for op in (trained, attend_latent_pages):
        leaves: list[Tensor] = []

        def run(
            q_THD: Tensor, window: Pages, *args: Any, op=op, leaves=leaves, **how: Any
        ) -> Tensor:
            pool = how.pop("pool")
            leaves += [
                x.detach().requires_grad_() for x in (q_THD, window.values, how.pop("sinks_H"))
            ]
            if pool is not None:
                leaves.append(pool.values.detach().requires_grad_())
                pool = replace(pool, values=leaves[3])
            window = replace(window, values=leaves[1])
            return op(leaves[0], window, *args, pool=pool, sinks_H=leaves[2], **how)

        out = pack.run(run)
        grads.append(torch.autograd.grad(out[: sum(LENGTHS)].sum(), leaves))
    for grad in grads[0]:
        assert bool(grad.isfinite().all()) and grad.count_nonzero() > 0
    return compare_bits(*grads, "gradients")


def with_sinks(pack: Pack, sinks_H: Tensor | None) -> Tensor:
    """The answer with these sinks, or none."""
    return pack.run(lambda *args, **how: triton.attend_latent(*args, **how | {"sinks_H": sinks_H}))


def extremes() -> int:
    """A sink that outweighs all rows, or nothing; pages that are rings; turns."""
    world = World(TOTALS, 4, 20, 16, 2, 0, torch.float32)
    pack = Pack(world, (1, 0, 0, 1, 0), (130, 2, 0, 63, 0), per_page=64)
    whole = kernels(pack)
    count = compare_bits(kernels(replace(pack, ring=16)), whole, "a ring")
    count += compare_bits(kernels(pack, memory=1), whole, "a token at a time")
    for sink in (1e4, -1e4):
        got = with_sinks(pack, torch.full((4,), sink))
        want = torch.zeros_like(got) if sink > 0 else with_sinks(pack, None)
        assert torch.equal(got, want)
        count += got.numel()
    return count


def no_entries_yet(pack: Pack, whole: Tensor) -> int:
    """Tokens that see nothing of the pool have the bits that they have without one."""
    alone = pack.run(
        lambda *args, **how: triton.attend_latent(*args, **how | {"pool": None}),
        rope=pack.told().get("rope", 0),
    )
    none = ((pack.who.position_T + 1) // pack.world.stride == 0) & (pack.who.sequence_T >= 0)
    return compare_bits(whole[none], alone[none], "no entries")


def main() -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # what nobody has written yet is NaN
    interpreter.InterpreterBuilder.create_dot = exact_dot
    calls, values = 0, extremes()
    for case in CASES:
        pack = Pack(World(TOTALS, *case), LENGTHS, PAST, padding=2)
        whole, off = kernels(pack), OFF[case[5]]
        listed = pack.run(attend_latent_pages, **pack.told())
        torch.testing.assert_close(whole, listed, rtol=off, atol=off)
        torch.testing.assert_close(whole[:-2].double(), plain(pack), rtol=off, atol=off)
        assert whole[-2:].eq(0).all()
        flat = replace(pack, per_page=None)
        values += compare_bits(kernels(flat), whole, "flat")
        values += compare_bits(kernels(replace(pack, per_page=64, more=70)), whole, "other pages")
        values += compare_steps(kernels, pack, whole)
        calls += 4
        if case[3] > 1:
            values += no_entries_yet(pack, whole)
            calls += 1
        if not case[6]:
            values += gradients(flat)
            calls += 1
    assert values > 0
    print(f"{calls} calls agree, {values} values")


if __name__ == "__main__":
    main()
