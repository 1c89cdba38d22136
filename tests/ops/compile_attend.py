"""The kernels of both attentions' backward, for `tests.ops.compile_child`."""

from typing import Any

import torch

from unified_models.ops.attend.backward_triton import gradients
from unified_models.ops.attend_latent import backward_triton as latent
from unified_models.ops.attend_latent.triton import attend_latent
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


def backward_latent() -> None:
    """DeepSeek-V4's 64 heads over rows of 512: a window alone, with a pool that is read whole, and with 512 picks of
    one; narrow heads, and float32."""
    S, T = 3, 65
    for dtype, H, D in (
        (torch.bfloat16, 64, 512), (torch.bfloat16, 5, 24), (torch.float32, 4, 32),
    ):  # fmt: skip
        numbers = [torch.empty(n, dtype=torch.int32) for n in (T, T, S + 1, S, S)]
        base = torch.empty(S, dtype=torch.int32)
        q, rows = torch.empty(T, H, D, dtype=dtype), torch.empty(T, D, dtype=dtype)
        pool = Pages.flat(torch.empty(16, D, dtype=dtype), base)
        kinds: list[dict[str, Any]] = [
            {},
            {"pool": pool, "count_T": torch.empty(T, dtype=torch.int64), "most_entries": 99},
            {"pool": pool, "picks_TK": torch.empty(T, 512, dtype=torch.int64)},
        ]
        for how in kinds if D == 512 else kinds[2:]:
            window, who, lse_TH = Pages.flat(rows, base), Sequences(*numbers), torch.empty(T, H)
            how |= {"scale": 0.1, "keep": 128, "sinks_H": torch.empty(H)}
            attend_latent(q, window, who, lse_TH=lse_TH, **how)
            latent.gradients(q, q, window, who, q, lse_TH, **how)
