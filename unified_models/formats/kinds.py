"""What a weight format is."""

from typing import Literal, Protocol

import torch
from torch import Tensor

Packed = dict[str, Tensor]
Input = Literal["plain", "dynamic", "static"]


class Format(Protocol):
    """A weight format. `pack` and `unpack` work on the last two dimensions; leading ones are stacks."""

    @property
    def name(self) -> str:
        """As config readers, errors and reports spell it."""

    @property
    def activation(self) -> torch.dtype:
        """dtype of what a linear with this weight returns, unless its caller asks for another."""

    @property
    def input(self) -> Input:
        """How a linear with this weight sees its input: "plain" as it is; "dynamic" in FP8, per token and 128
        channels; "static" in FP8 with the one scale that the checkpoint gives (activations.py)."""

    def pack(self, master: Tensor) -> Packed:
        """The bytes that the forward reads."""

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        """float32 values of the packed bytes, of the master's shape."""
