"""The losses against an independent numpy statement in float64, and their gradients against finite differences."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from unified_models.rl.losses import (
    CORRECTIONS,
    EPS,
    Tokens,
    advantages,
    correction_weight,
    k3,
    policy_loss,
    weights,
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def batch(n: int = 40) -> tuple[Tensor, Tokens]:
    """Logprobs around each other, so that ratios fall on all sides of the clip and of the cap; float64."""
    draw = np.random.default_rng(3)
    rollout, old, now, reference = draw.normal(-1.0, 0.5, (4, n))
    advantage, weight = draw.normal(0.0, 1.0, n), draw.uniform(0.0, 0.1, n)
    weight[::7] = 0
    arrays = map(torch.tensor, (old, rollout, advantage, weight, reference))
    return torch.tensor(now, requires_grad=True), Tokens(*arrays)


def stated(now: np.ndarray, t: Tokens, correction: str, cap: float, kl_coef: float) -> float:
    """The loss, one token after the other, as the papers print it."""
    total = 0.0
    assert t.reference is not None
    rows = zip(now, t.old, t.rollout, t.advantage, t.weight, t.reference, strict=True)
    for lp, old, roll, a, w, ref in (map(float, row) for row in rows):
        r, rho = math.exp(lp - old), math.exp(old) / math.exp(roll)
        if a >= 0:
            gain = a * min(r, 1 + CLIP["clip_high"])
        else:
            gain = a * max(r, 1 - CLIP["clip_low"])
        c = {"none": 1.0, "tis": min(rho, cap), "mis": rho if rho <= cap else 0.0}[correction]
        kl = math.exp(ref) / math.exp(lp) - (ref - lp) - 1
        total += w * (kl_coef * kl - c * gain)
    return total


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_policy_loss(correction: str, kl_coef: float) -> None:
    now, tokens = batch()
    told = policy_loss(now, tokens, correction=correction, cap=1.5, kl_coef=kl_coef, **CLIP)
    expected = stated(now.detach().numpy(), tokens, correction, 1.5, kl_coef)
    assert float(told.loss.detach()) == pytest.approx(expected, rel=1e-12)
    other = stated(now.detach().numpy(), tokens, correction, 1.4, kl_coef)
    assert (other == expected) == (correction == "none"), "the cap has no effect"


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_policy_loss_backward(correction: str) -> None:
    now, tokens = batch()
    policy_loss(now, tokens, correction=correction, cap=1.5, kl_coef=0.3, **CLIP).loss.backward()
    base, step = now.detach().numpy(), 1e-6
    assert now.grad is not None
    for i in range(len(base)):
        bump = np.zeros_like(base)
        bump[i] = step
        up, down = (stated(base + s * bump, tokens, correction, 1.5, 0.3) for s in (1, -1))
        assert float(now.grad[i]) == pytest.approx((up - down) / (2 * step), abs=1e-7)


def test_policy_loss_counts_what_is_clipped() -> None:
    old = torch.zeros(5)
    lp = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.5]).requires_grad_()
    tokens = Tokens(old, old, torch.tensor([1.0, -1, 1, -1, 1]), torch.tensor([1.0, 1, 1, 1, 0]))
    told = policy_loss(lp, tokens, clip_low=0.2, clip_high=0.2)
    told.loss.backward()
    assert told.clipped == 2
    assert lp.grad is not None
    assert lp.grad.ne(0).tolist() == [False, True, True, False, False]
    assert told.furthest == pytest.approx(math.exp(0.5) - 1)


def test_equal_bits_need_no_correction() -> None:
    """rho is 1.0 exactly where old and rollout have the same bits, for every correction; with one ulp it is not."""
    lps = torch.randn(1000) * 5
    for kind in CORRECTIONS:
        assert correction_weight(kind, lps, lps.clone(), 2.0).eq(1.0).all()
    near = torch.nextafter(lps, torch.full_like(lps, 100.0))
    assert not correction_weight("tis", lps, near, 2.0).eq(1.0).all()


def test_advantages() -> None:
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0.2, 0.2, 1, 0])
    shown = advantages(rewards, 4).numpy()
    grouped = rewards.numpy().astype(np.float64).reshape(3, 4)
    expected = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + EPS)
    assert shown == pytest.approx(expected.flatten(), abs=1e-6)
    assert (shown[4:8] == 0).all()
    with pytest.raises(ValueError, match="12 rewards in groups of 5"):
        advantages(rewards, 5)


def test_equal_rewards_that_are_no_binary_fractions_give_exactly_zero() -> None:
    assert advantages(torch.full((7,), 0.2), 7).eq(0).all()


def test_weights() -> None:
    lengths, cut = [2, 3, 1, 4], [False, True, False, False]
    mixed = torch.tensor([1.0, 0, 0, 1])
    grpo = weights("grpo", lengths, mixed, cut, 2)
    assert grpo.tolist() == pytest.approx([1 / 8, 1 / 12, 1 / 4, 1 / 16])
    assert float((grpo * torch.tensor(lengths)).sum()) == pytest.approx(1)
    assert weights("dapo", lengths, mixed, cut, 2).tolist() == pytest.approx(
        [1 / 7, 0, 1 / 7, 1 / 7]
    )
    same = torch.tensor([1.0, 1, 0, 1])
    assert weights("dapo", lengths, same, cut, 2).tolist() == pytest.approx([0, 0, 1 / 5, 1 / 5])
    assert weights("dapo", lengths, torch.ones(4), cut, 2).eq(0).all()


def test_k3_is_an_estimate_of_kl() -> None:
    """Over a whole distribution, the mean of k3 is KL(p || q)."""
    p, q = torch.softmax(torch.randn(2, 50, dtype=torch.float64), 1)
    mean = float((p * k3(p.log(), q.log())).sum())
    assert mean == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-10)
    assert (k3(p.log(), q.log()) >= 0).all()
