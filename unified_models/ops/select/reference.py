"""The rule of `select` for one token, by sorting Python tuples."""

from torch import Tensor


def scores(q_JI: Tensor, weights_J: Tensor, rows_NI: Tensor) -> Tensor:
    return (weights_J[:, None] * (q_JI @ rows_NI.T).clamp_min(0)).sum(0)


def top(scores_N: Tensor, k: int) -> list[int]:
    ranked = sorted(((s + 0.0, w) for w, s in enumerate(scores_N.tolist()) if s == s), reverse=True)
    picks = sorted((w for _, w in ranked[:k]), reverse=True)
    return picks + [-1] * (k - len(picks))
