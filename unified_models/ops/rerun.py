"""A kernel's values with the gradient of what the kernel means."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Any], meaning: Callable[..., Any], *args: Any
    ) -> Any:
        ctx.meaning = meaning
        ctx.others = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.tensors = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.tensors))
        return kernel(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        args = list(ctx.others)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            args[i] = tensor.detach().requires_grad_(ctx.needs_input_grad[i + 2])
        asked = [i for i in ctx.tensors if ctx.needs_input_grad[i + 2]]
        with torch.enable_grad():
            outs = ctx.meaning(*args)
        outs = outs if isinstance(outs, tuple) else (outs,)
        known = [(out, g) for out, g in zip(outs, grads, strict=True) if g is not None]
        inputs = [args[i] for i in asked]
        found = torch.autograd.grad(
            [out for out, _ in known], inputs, [g for _, g in known], allow_unused=True
        )
        given: list[Any] = [None] * len(args)
        for i, grad in zip(asked, found, strict=True):
            given[i] = grad
        return None, None, *given


def rerun(kernel: Callable[..., Any], meaning: Callable[..., Any], *args: Any) -> Any:
    """kernel(*args), a tensor or a tuple of them; its backward runs `meaning(*args)` again and sends gradients through
    that, to the tensors among args. Both take the same arguments and return alike."""
    return apply(_Rerun, kernel, meaning, *args)
