"""Choosing tokens: argmax, or an exponential race whose noise is a pure function of a key and the token id.

No generator state: a draw does not depend on who else is in the batch, on chunking, preemption or device.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


def key(seed: int, stream: int, index: int) -> int:
    """The signed 64-bit key of output token `index` of one stream."""
    digest = blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def exponentials(keys: Sequence[int], size: int, device: torch.device) -> Tensor:
    """[N, size] float32 draws of Exp(1): splitmix64 of (key, column), 53 bits of it through -log1p(-u).

    A float32 u keeps its relative precision where u is small, which is where a race is decided.
    """
    keys_N = torch.tensor(keys, dtype=torch.int64, device=device)
    steps = torch.arange(1, size + 1, dtype=torch.int64, device=device) * GOLDEN
    z = keys_N[:, None] + steps
    z = (z ^ _shift(z, 30)) * MIX_1
    z = (z ^ _shift(z, 27)) * MIX_2
    z = z ^ _shift(z, 31)
    u = (_shift(z, 11).to(torch.float32) + 0.5) * 2.0**-53
    return -torch.log1p(-u.clamp(max=BELOW_ONE))


def choose(logits_NV: Tensor, temperature_N: Tensor, keys: Sequence[int | None]) -> Tensor:
    """ids_N int64: for a key, a draw from softmax(logits / T) as argmax(logits / T - log Exp(1)); for None, argmax.

    The lower id wins a tie.
    """
    ids_N = logits_NV.argmax(-1)
    drawn = [i for i, k in enumerate(keys) if k is not None]
    if drawn:
        noise = exponentials(
            [k for k in keys if k is not None], logits_NV.shape[1], logits_NV.device
        )
        rows = torch.tensor(drawn, device=logits_NV.device)
        ids_N[rows] = (logits_NV[rows] / temperature_N[rows, None] - noise.log()).argmax(-1)
    return ids_N


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
