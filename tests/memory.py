"""How much memory tensors take."""

import weakref
from typing import Any

from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Bytes of tensors alive at once, of those made while this lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0

    def freed(self, size: int) -> None:
        self.alive -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        for t in tree_leaves(out):
            if is_tensor(t) and t.untyped_storage()._cdata not in given:
                size = t.untyped_storage().nbytes()
                self.alive += size
                self.peak = max(self.peak, self.alive)
                weakref.finalize(t, self.freed, size)
        return out
