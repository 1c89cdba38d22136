"""What a weight knows of the processes that its master is cut over; a trainer's adapter says the rest."""

from typing import Any, Protocol

from torch import Tensor

PACKED = ("resident", "rebuild")
"""What becomes of a cut weight's packed bytes: they stay after a commit, or are derived at each reading."""


class Sharding(Protocol):
    """Where a weight's master lies, if it is cut over processes and made whole around a forward."""

    @property
    def owned(self) -> Tensor:
        """The tensor that the optimizer changes; its version is the weight's."""

    @property
    def resident(self) -> bool:
        """Whether the packed bytes stay after a commit. If not they are derived at each reading."""

    @property
    def group(self) -> Any:
        """The processes that it is cut over; None: it is not."""

    def meet(self, master: Tensor | None) -> None:
        """Called at each reading, with the master as it is then."""

    def renew(self) -> None:
        """Called at each commit of a master that changed: what was made whole before is of no use."""


def whole(t: Tensor) -> Tensor:
    """A DTensor's full value, gathered from all processes; any other tensor itself."""
    gathered: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return gathered
