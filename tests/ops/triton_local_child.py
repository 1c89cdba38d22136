"""Token-local kernels in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.ops.triton_local_child`.

Their meaning, on memory that is poisoned around what they may read, and one row's bits whatever stands beside it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conftest import poisoning
from tests.ops.conftest import compare_bits
from unified_models.ops import gated_norm, rms_norm, route_weights, silu, swiglu, time_step
from unified_models.ops.activation import triton as activation
from unified_models.ops.gated_norm import triton as gated
from unified_models.ops.rms_norm import triton as norms
from unified_models.ops.router_scores import triton as routes

EPS = 1e-5
SHAPES = ((1, 16), (5, 128), (3, 7), (2, 3, 48), (4, 513), (2, 2688))


def strided(*shape: int, dtype: torch.dtype, past: int = 16) -> Tensor:
    """Random rows within wider ones, whose other elements are NaN."""
    memory = torch.full((*shape[:-1], shape[-1] + past), torch.nan, dtype=dtype)
    memory[..., : shape[-1]] = 2 * torch.randn(shape)
    return memory[..., : shape[-1]]


def close(got: Tensor, want: Tensor) -> None:
    """float32 arithmetic and, in bfloat16, two roundings, where the interpreter cuts."""
    assert got.dtype == want.dtype, f"{got.dtype} is not {want.dtype}"
    off = 2e-6 if got.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got.double(), want.double(), rtol=off, atol=1e-6)


def check_norms() -> int:
    count = 0
    for shape in SHAPES:
        N = shape[-1]
        for dtype in (torch.bfloat16, torch.float32):
            x, weight = strided(*shape, dtype=dtype), 1 + 0.2 * torch.randn(N)
            for scale in (weight, None):
                got = norms.rms_norm(x, scale, EPS, dtype)
                close(got, rms_norm(x, scale, EPS))
                compare_bits(norms.rms_norm(x[-1:], scale, EPS, dtype), got[-1:], "one row")
                compare_bits(norms.rms_norm(x.clone(), scale, EPS, dtype), got, "contiguous")
                count += 3
            close(norms.rms_norm(x, weight, EPS, torch.float32), rms_norm(x.float(), weight, EPS))
            groups = next(g for g in (8, 3, 1) if N % g == 0)
            gate = strided(*shape, dtype=dtype, past=32)
            got = gated.gated_norm(x, gate, weight, EPS, groups)
            close(got, gated_norm(x, gate, weight, EPS, groups=groups))
            alone = gated.gated_norm(x[-1:], gate[-1:], weight, EPS, groups)
            compare_bits(alone, got[-1:], "one row")
            count += 3
    assert norms.rms_norm(torch.ones(0, 16), None, EPS, torch.float32).shape == (0, 16)
    return count


def check_elements() -> int:
    count = 0
    truths = {
        activation.sigmoid: torch.sigmoid,
        activation.silu: F.silu,
        activation.softplus: F.softplus,
        activation.sqrt_softplus: lambda x: F.softplus(x).sqrt(),
    }
    far = torch.tensor([-1e4, -104.0, -88.0, -16.6, -1e-6, 0.0, 19.99, 20.01, 88.0, 1e4, torch.inf])
    for shape in ((11,), (1, 16), (5, 3, 100), (3, 1500)):
        x = far if shape == (11,) else 4 * strided(*shape, dtype=torch.float32)
        for kernel, truth in truths.items():
            close(kernel(x), truth(x.double()).float())
            compare_bits(kernel(x[-1:]), kernel(x)[-1:], "one row")
            count += 2
        close(activation.silu(x, torch.bfloat16), silu(x, torch.bfloat16))
        count += 1
        for dtype in (torch.bfloat16, torch.float32):
            gate, up = x.to(dtype), 4 * strided(*shape, dtype=dtype)
            close(activation.relu2(gate), gate.float().relu().square().to(dtype))
            for limit in (None, 3.0):
                close(activation.swiglu(gate, up, limit), swiglu(gate, up, limit))
            count += 3
    nan = torch.full((3,), torch.nan)
    outs = [kernel(nan) for kernel in (*truths, activation.relu2)]
    outs += [activation.swiglu(nan, far[3:6], 1.0), activation.swiglu(far[3:6], nan, 1.0)]
    assert all(bool(out.isnan().all()) for out in outs)
    return count + len(outs)


def check_models() -> int:
    """Time steps, clamped on both sides, and the weights of chosen experts."""
    count = 0
    for dtype, limit in ((torch.bfloat16, (0.0, torch.inf)), (torch.float32, (0.3, 0.9))):
        dt, bias = strided(7, 24, dtype=dtype), torch.randn(24)
        got = activation.time_step(dt, bias, *limit)
        close(got, time_step(dt, bias, limit))
        compare_bits(activation.time_step(dt[-1:], bias, *limit), got[-1:], "one row")
        scores, ids = torch.rand(7, 40), torch.rand(7, 40).argsort(1)[:, :6]
        got = routes.route_weights(scores, ids, 2.5)
        close(got, route_weights(scores, ids, 2.5))
        compare_bits(routes.route_weights(scores[-1:], ids[-1:], 2.5), got[-1:], "one row")
        count += 4
    return count


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoning(torch.empty)
    print(f"{check_norms() + check_elements() + check_models()} calls agree")


if __name__ == "__main__":
    main()
