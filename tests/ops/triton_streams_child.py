"""Kernels of residual streams, of rotary embedding and of quantised rows in Triton's interpreter:
`TRITON_INTERPRET=1 python -m tests.ops.triton_streams_child`.

Their meaning, on memory that is poisoned around what they may read, and one token's bits whatever stands beside it.
"""

import itertools

import torch
from torch import Tensor

from tests.conftest import poisoning
from tests.ops.conftest import compare_bits, parts
from unified_models.autograd import apply
from unified_models.formats import activations
from unified_models.ops import Rope, hyper_collapse, hyper_expand, hyper_maps, hyper_normalize, rope
from unified_models.ops import quantize_triton as quantize
from unified_models.ops.hyper_connect import _hyper_expand, _hyper_maps
from unified_models.ops.hyper_connect import triton as hyper
from unified_models.ops.rerun import rerun
from unified_models.ops.rope import _Rope, frequencies
from unified_models.ops.rope import triton as turns

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float32)
CPU = torch.device("cpu")


def strided(*shape: int, dtype: torch.dtype = torch.float32, past: int = 16) -> Tensor:
    """Random rows within wider ones, whose other elements are NaN."""
    memory = torch.full((*shape[:-1], shape[-1] + past), torch.nan, dtype=dtype)
    memory[..., : shape[-1]] = 2 * torch.randn(shape)
    return memory[..., : shape[-1]]


def close(got: Tensor, want: Tensor, off: float = 4e-6) -> None:
    """float32 arithmetic and, in bfloat16, two roundings, where the interpreter cuts."""
    assert got.dtype == want.dtype, f"{got.dtype} is not {want.dtype}"
    off = off if got.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got.double(), want.double(), rtol=off, atol=off)


def check_mixes() -> int:
    """The mean square, and both mixes; of float32 these have the bits of torch's expressions."""
    count = 0
    for (X, M), dtype in itertools.product(((4, 48), (3, 5), (2, 2100), (8, 16)), DTYPES):
        streams, out = strided(3, X, M, dtype=dtype), strided(3, M, dtype=dtype)
        projected, pre, comb = strided(3, X + 1), torch.rand(3, X), torch.rand(3, X, X)
        normed = hyper.hyper_normalize(projected, streams, EPS)
        close(normed, hyper_normalize(projected, streams, EPS))
        for same in (streams.clone(), streams.transpose(0, 1).contiguous().transpose(0, 1)):
            compare_bits(hyper.hyper_normalize(projected, same, EPS), normed, "strides")
        few = hyper.hyper_normalize(projected[2:], streams[2:], EPS)
        compare_bits(few, normed[2:], "one row")
        views = out[:, None].expand(-1, X, -1)
        got = hyper.hyper_normalize(projected, views, EPS)
        compare_bits(hyper.hyper_normalize(projected, views.clone(), EPS), got, "equal streams")
        collapsed = hyper.hyper_collapse(streams, pre)
        expanded = hyper.hyper_expand(out, streams, pre, comb)
        wants = hyper_collapse(streams, pre), hyper_expand(out, streams, pre, comb)
        for got, want in zip((collapsed, expanded), wants, strict=True):
            close(got, want)
            if dtype == torch.float32:
                compare_bits(got, want, "torch's")
        compare_bits(hyper.hyper_collapse(streams[2:], pre[2:]), collapsed[2:], "one row")
        few = hyper.hyper_expand(out[2:], streams[2:], pre[2:], comb[2:])
        compare_bits(few, expanded[2:], "one row")
        count += 9
    assert hyper.hyper_collapse(torch.ones(0, 4, 8), torch.ones(0, 4)).shape == (0, 8)
    return count


def check_maps() -> int:
    """Maps of tokens in several programs, of far logits, and beside NaN."""
    count = 0
    for X, iterations in ((4, 20), (4, 1), (3, 5), (2, 3), (8, 2)):
        C = X * (2 + X)
        mixes, scale, base = strided(19, C), torch.randn(3), torch.randn(C)
        mixes[3, 2 * X :] = torch.randint(0, 2, (X * X,)) * 160.0 - 80
        args = (scale, base, X, iterations, EPS)
        got = hyper.hyper_maps(mixes, *args)
        wants = hyper_maps(mixes, scale, base, streams=X, iterations=iterations, eps=EPS)
        for kernel, want in zip(got, wants, strict=True):
            close(kernel, want, 2e-5)
        for part in (slice(3, 4), slice(5, 18), slice(17, 19)):
            compare_bits(hyper.hyper_maps(mixes[part], *args), [m[part] for m in got], str(part))
        mixes[torch.arange(19) != 11] = torch.nan
        dirty = hyper.hyper_maps(mixes, *args)
        compare_bits([m[11] for m in dirty], [m[11] for m in got], "next to NaN")
        assert all(bool(m[12].isnan().all()) for m in dirty)
        count += 8
    return count


def check_turns() -> int:
    """The rotation, in one program and in several of a token; dims that stand still lose nothing."""
    tables = (Rope(8, 1e4), Rope(8, 1e4, halves=True), Rope(12, 1e5, 16.0, 32.0, 1.0, 4096))
    count, positions = 0, torch.tensor([0, 1, 70000, 1 << 20])
    for table, shape, inverse in itertools.product(
        tables, ((4, 12), (4, 5, 40), (4, 2, 3, 12)), (False, True)
    ):
        for source, dtype in ((torch.bfloat16,) * 2, (torch.float32,) * 2, DTYPES[::-1]):
            x = strided(*shape, dtype=source)
            args = (frequencies(table, CPU), table.halves, inverse, dtype)
            got = turns.rope(x, positions, *args)
            close(got, rope(x, positions, table, inverse=inverse, dtype=dtype))
            if source == dtype:
                still = shape[-1] - table.dim
                compare_bits(got[..., :still], x[..., :still], "still", empty=still == 0)
            alone = turns.rope(x[3:], positions[3:].int(), *args)
            compare_bits(alone, got[3:], "one token")
            count += 3
    x, args = strided(4, 37, 256), (frequencies(tables[0], CPU), False, False, torch.float32)
    got, turns.MANY = turns.rope(x, positions, *args), 4
    compare_bits(turns.rope(x, positions, *args), got, "all heads in a program")
    return count + 1


def check_gradients() -> int:
    """What a kernel sends back: of streams through torch's expression, of a rotation the rotation back."""
    mixes, scale, base = torch.randn(5, 24), torch.randn(3), torch.randn(24)
    streams, out = torch.randn(5, 4, 16), torch.randn(5, 16)
    pre, comb = torch.rand(5, 4), torch.rand(5, 4, 4)
    positions, table, bf16 = torch.arange(5) * 7, Rope(8, 1e4, halves=True), torch.bfloat16
    pairs = (
        (
            (mixes, scale, base),
            lambda *leaves: rerun(hyper.hyper_maps, _hyper_maps, *leaves, 4, 3, EPS),
            lambda *leaves: hyper_maps(*leaves, streams=4, iterations=3, eps=EPS),
        ),
        (
            (out, streams, pre, comb),
            lambda *leaves: rerun(hyper.hyper_expand, _hyper_expand, *leaves),
            hyper_expand,
        ),
        (
            (streams,),
            lambda x: apply(_Rope, x, positions, table, False, bf16),
            lambda x: rope(x, positions, table, dtype=bf16),
        ),
    )
    for leaves, kernel, op in pairs:
        leaves = [x.requires_grad_() for x in leaves]
        outs, wants = parts(kernel(*leaves)), parts(op(*leaves))
        given = [torch.randn(want.shape).to(want.dtype) for want in wants]
        grads = torch.autograd.grad(wants, leaves, given)
        for got, want in zip(torch.autograd.grad(outs, leaves, given), grads, strict=True):
            close(got, want, 2e-5)
        for leaf in leaves:
            leaf.requires_grad_(False)
    return len(pairs)


def same_codes(got: Tensor, want: Tensor) -> None:
    """Equal bytes, where NaN is any NaN."""
    got, want = got.float(), want.float()
    compare_bits(torch.where(got.isnan(), torch.nan, got), want.where(~want.isnan(), torch.nan), "")


def check_codes() -> int:
    """The bytes of formats/activations: random rows, far ones, and every bfloat16 that there is."""
    count = 0
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(64, 1024)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[~codes.isnan()].sort()[0]
    middle = (codes[1:] + codes[:-1]) / 2
    near = [middle.view(torch.int32) + n for n in (-1, 0, 1)]
    ties = torch.stack(near).view(torch.float32)  # halfway between codes, and an ulp to each side
    one = torch.tensor(1.0)
    for x in (every, every.float(), ties):
        same_codes(quantize.static_codes(x, one), activations.static_codes(x, one))
        got, want = quantize.quantize_rows(x), activations.quantize_rows(x)
        same_codes(got[0], want[0])
        compare_bits(got[1], want[1], "scales")
        count += 3
    for K, dtype in itertools.product((1, 127, 128, 129, 576), DTYPES):
        x = strided(7, K, dtype=dtype) * torch.logspace(-20, 20, 7, dtype=dtype)[:, None]
        x[3, : K // 2] = -0.0
        want = activations.quantize_rows(x)
        for into in (*DTYPES, torch.float8_e4m3fn):
            got = quantize.quantize_rows(x, into)
            assert got[0].dtype == into
            compare_bits((got[0].float(), got[1]), want, f"rows of {K}")
            got = quantize.quantize_rows(x[:6].view(2, 3, K), into)
            compare_bits(got[0].float().flatten(0, 1), want[0][:6], "of groups")
            compare_bits(got[1].flatten(0, 1), want[1][:6], "of groups")
            for scale in (torch.tensor(0.013), torch.rand(7, 1)):
                got = quantize.static_codes(x, scale, into)
                compare_bits(got.float(), activations.static_codes(x, scale), f"static {K}")
            count += 5
    assert quantize.quantize_rows(torch.ones(0, 130))[0].shape == (0, 256)
    return count


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoning(torch.empty)
    count = check_mixes() + check_maps() + check_turns() + check_gradients() + check_codes()
    print(f"{count} calls agree")


if __name__ == "__main__":
    main()
