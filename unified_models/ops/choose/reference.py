"""The rule of `choose` by sorting Python tuples."""

from torch import Tensor


def choose(scores_E: Tensor, k: int) -> list[int]:
    """One row."""
    values = scores_E.tolist()
    ranked = sorted((-s, e) for e, s in enumerate(values) if s == s)
    return [e for _, e in ranked[:k]]
