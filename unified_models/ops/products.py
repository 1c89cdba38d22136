"""Products of stacks of matrices whose bits depend neither on how many there are, nor on their rows, nor on threads."""

import torch
from torch import Tensor

from unified_models.autograd import apply


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, float32: [B, M, K] by [B, K, N]. On CPU, M and the lanes of K and N are whole (`blocks.filled`).

    CPU: torch.bmm, never on fewer products than there are threads. With fewer, MKL lets several threads share one
    product and cuts its sum between them: other bits. So each product of a short stack runs beside copies of itself,
    which are dropped. CUDA: the kernel of `products_triton`, since cuBLAS chooses by the number of products.
    """
    if a.is_cuda:
        return apply(_KernelProduct, a, b)
    threads = torch.get_num_threads()
    if len(a) >= threads or len(a) == 0:
        return torch.bmm(a, b)
    outs = [
        torch.bmm(*(x[i : i + 1].expand(threads, -1, -1) for x in (a, b)))[:1]
        for i in range(len(a))
    ]
    return torch.cat(outs)


class _KernelProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor, b: Tensor) -> Tensor:
        from unified_models.ops.products_triton import product

        ctx.save_for_backward(a, b)
        return product(a, b)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors  # type: ignore[attr-defined]
        da = grads[0] @ b.mT if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        db = a.mT @ grads[0] if ctx.needs_input_grad[1] else None  # type: ignore[attr-defined]
        return da, db
