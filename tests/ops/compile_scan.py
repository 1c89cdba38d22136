"""The kernels of the scan's backward, for `tests.ops.compile_child`."""

import torch

from unified_models.ops.pages import Sequences
from unified_models.ops.scan.backward_triton import scan_backward
from unified_models.ops.scan.places import Inputs


def backward_scan() -> None:
    """64 heads of 64 x 128 in chunks of 128: a pack whose x, b and c lie side by side; rows in float32 with states
    before and after the step; all in float32."""
    T, S, H, P, G, N, Q = 33, 3, 64, 64, 8, 128, 128
    sizes = (H * P, G * N, G * N)
    for dtype, rows, carried in (
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float32, False),
    ):
        x, b, c = torch.empty(T, sum(sizes), dtype=dtype).split(sizes, 1)
        x, b, c = (part.unflatten(1, (n, -1)) for part, n in ((x, H), (b, G), (c, G)))
        numbers = [torch.empty(n, dtype=torch.int32) for n in (T, T, S + 1, S, S)]
        of = Inputs(
            x.to(rows), torch.empty(T, H), b.to(rows), c, torch.empty(H), torch.empty(H),
            torch.empty(4, H * P * N, dtype=dtype), torch.empty(S, 5, dtype=torch.int32),
            torch.empty(S, dtype=torch.int32), Sequences(*numbers), Q,
        )  # fmt: skip
        dy = torch.empty(T, H, P, dtype=dtype)
        scan_backward(of, dy, torch.empty(4, H, P, N) if carried else None, before=carried)
