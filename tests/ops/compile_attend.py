"""The kernels of attention's backward, for `tests.ops.compile_child`."""

import torch

from unified_models.ops.attend.backward_triton import gradients
from unified_models.ops.pages import Pages, Sequences


def backward_attention() -> None:
    """Nemotron's heads of 128 in 2 groups, Qwen3's in 8 with a window, and float32; short packs, and of 16,384."""
    S = 3
    for dtype, H, G, D, keep in (
        (torch.bfloat16, 32, 2, 128, None),
        (torch.bfloat16, 32, 8, 128, 4096),
        (torch.float32, 4, 2, 32, None),
    ):
        for T in (33, 16384):
            rows = torch.empty(T, 2 * G * D, dtype=dtype)
            numbers = [torch.empty(n, dtype=torch.int32) for n in (T, T, S + 1, S, S)]
            base = torch.empty(S, dtype=torch.int32)
            q = torch.empty(T, H, D, dtype=dtype)
            k, v = Pages.flat(rows, base), Pages.flat(rows, base, G * D)
            gradients(
                q,
                q,
                k,
                v,
                Sequences(*numbers),
                q,
                torch.empty(T, H),
                scale=0.1,
                keep=keep,
                groups=G,
            )
