"""Products of stacks of matrices whose bits depend neither on how many there are nor on the number of threads."""

import torch
from torch import Tensor


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """torch.bmm, never on fewer products than there are threads.

    With fewer, MKL lets several threads share one product and cuts its sum between them: other bits. So each product of
    a short stack runs beside copies of itself, which are dropped.
    """
    threads = torch.get_num_threads()
    if len(a) >= threads or len(a) == 0:
        return torch.bmm(a, b)
    outs = [
        torch.bmm(*(x[i : i + 1].expand(threads, -1, -1) for x in (a, b)))[:1]
        for i in range(len(a))
    ]
    return torch.cat(outs)
