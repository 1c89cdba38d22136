"""A one-hot product."""

from torch import Tensor
from torch.nn import functional as F


def embed(ids_T: Tensor, table_VM: Tensor) -> Tensor:
    return F.one_hot(ids_T, len(table_VM)).to(table_VM.dtype) @ table_VM
