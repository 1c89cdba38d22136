"""Typed entry to autograd Functions, which torch leaves untyped."""

from typing import Any

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """`function.apply(*args)` for a Function of one output."""
    out: Tensor = function.apply(*args)
    return out
