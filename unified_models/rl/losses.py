"""Policy-gradient losses over sampled tokens, and corrections for a sampler that is not the policy.

r_t = pi(t) / pi_old(t), by the training forward now and at the start of the step; rho_t = pi_old(t) / pi_rollout(t).
Where both sides have the same bits, rho = 1 exactly, whatever the correction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("grpo", "dapo")
CORRECTIONS = ("none", "tis", "mis")
EPS = 1e-6
"""Beside the deviation of a group's rewards, which may be tiny."""


@dataclass(frozen=True)
class Tokens:
    """What is known of N sampled tokens beside the policy's logprobs; float, [N] each, no gradient.

    old, rollout: logprobs in nats. advantage: of the token's sequence. weight: its share in the mean of the update
    (`weights`); 0 leaves it out. reference: logprobs under the reference policy, where a KL term is asked for.
    """

    old: Tensor
    rollout: Tensor
    advantage: Tensor
    weight: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class Terms:
    """loss: scalar, differentiable. clipped: tokens of weight above 0 whose gradient the clip takes away. furthest:
    the largest |r - 1|; 0 without tokens."""

    loss: Tensor
    clipped: int
    furthest: float


def advantages(rewards_S: Tensor, group: int) -> Tensor:
    """(R - mean) / (deviation + EPS) within each group of `group` sequences in a row; float64 in between, float32 [S].

    DeepSeekMath (arXiv 2402.03300), section 4.1.2; the deviation is that of the population. A group of equal rewards
    gets 0. ValueError: the number of sequences is no multiple of group.
    """
    if len(rewards_S) % group:
        raise ValueError(f"{len(rewards_S)} rewards in groups of {group}")
    grouped = rewards_S.double().view(-1, group)
    apart = grouped - grouped.mean(1, keepdim=True)
    deviation = grouped.std(1, correction=0, keepdim=True)
    same = grouped.amax(1, keepdim=True) == grouped.amin(1, keepdim=True)
    return torch.where(same, 0.0, apart / (deviation + EPS)).flatten().float()


def weights(
    kind: str,
    lengths: Sequence[int],
    rewards_S: Tensor,
    truncated: Sequence[bool],
    group: int,
) -> Tensor:
    """The weight of each token of each sequence in one update's loss, float32 [S].

    lengths: sampled tokens. truncated: no end was sampled.
    grpo: 1 / (S * length), the mean over sequences of means over tokens (DeepSeekMath, eq. 3).
    dapo: 1 / tokens, the mean over tokens (arXiv 2503.14476, eq. 8), of what dynamic sampling and overlong filtering
    (3.2, 3.4) leave: groups of unequal rewards, sequences that ended. 0 for the rest; all 0 if nothing is left.
    """
    if kind == "grpo":
        return torch.tensor([1 / (len(lengths) * max(n, 1)) for n in lengths])
    grouped = rewards_S.view(-1, group)
    mixed = (grouped.amax(1) != grouped.amin(1)).repeat_interleave(group).tolist()
    kept = [m and not cut for m, cut in zip(mixed, truncated, strict=True)]
    count = sum(n for n, keep in zip(lengths, kept, strict=True) if keep)
    return torch.tensor([1 / count if keep else 0.0 for keep in kept])


def correction_weight(kind: str, old: Tensor, rollout: Tensor, cap: float) -> Tensor:
    """What a token's loss is multiplied by, [N], detached.

    none: 1. tis: min(rho, cap), truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly
    brings you off-policy RL training"; the truncation is that of IMPALA, arXiv 1802.01561, section 4.1). mis: rho
    where rho <= cap, else 0, masked importance sampling (Liu et al. 2025, "When speed kills stability").
    """
    rho = torch.exp(old - rollout).detach()
    if kind == "none":
        return torch.ones_like(rho)
    if kind == "tis":
        return rho.clamp(max=cap)
    return torch.where(rho <= cap, rho, 0.0)


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """e^(ref - lp) - (ref - lp) - 1, [N]: Schulman's low-variance estimate of KL(pi || ref) for tokens from pi."""
    apart = reference - logprobs
    return torch.expm1(apart) - apart


def policy_loss(
    logprobs: Tensor,
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    correction: str = "none",
    cap: float = 2.0,
    kl_coef: float = 0.0,
) -> Terms:
    """-sum_t weight_t c_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef sum_t weight_t k3_t.

    logprobs: of the policy, [N], differentiable. c: `correction_weight`. GRPO has clip_low = clip_high (PPO's clip,
    arXiv 1707.06347, eq. 7), DAPO a higher clip_high (clip-higher, 3.1). Sums over micro-batches add up to the loss of
    the update, since the weights are those of the update.
    """
    ratio = torch.exp(logprobs - tokens.old)
    limited = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * tokens.advantage, limited * tokens.advantage)
    factor = tokens.weight * correction_weight(correction, tokens.old, tokens.rollout, cap)
    loss = -(factor * gain).sum()
    if kl_coef:
        assert tokens.reference is not None, "a KL term without reference logprobs"
        loss = loss + kl_coef * (tokens.weight * k3(logprobs, tokens.reference)).sum()
    with torch.no_grad():
        up = (ratio > 1 + clip_high) & (tokens.advantage > 0)
        down = (ratio < 1 - clip_low) & (tokens.advantage < 0)
        clipped = int(((up | down) & (tokens.weight > 0)).sum())
        furthest = float((ratio - 1).abs().max()) if len(ratio) else 0.0
    return Terms(loss, clipped, furthest)
