"""Quantisation in front of an FP8 linear: per token and 128 channels."""

import math

import numpy as np
import pytest
import torch

from unified_models.formats.activations import (
    RoundTrip,
    dequantized_rows,
    quantize_rows,
    static_codes,
)


@pytest.mark.parametrize("k", [1, 127, 128, 129, 576])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_c07_c14_rows_and_groups(k: int, dtype: torch.dtype) -> None:
    x = (torch.randn(7, k) * torch.exp(3 * torch.randn(7, k))).to(dtype)
    codes, scales = quantize_rows(x)
    assert codes.shape == (7, -(-k // 128) * 128) and scales.shape == (7, -(-k // 128))
    values = x.float().numpy()
    for t, g in np.ndindex(*scales.shape):
        group = values[t, g * 128 : (g + 1) * 128]
        quotient = float(np.maximum(np.abs(group).max(), np.float32(1e-10)) / np.float32(448))
        fraction, exponent = math.frexp(quotient)
        scale = 2.0 ** (exponent - (fraction == 0.5))
        assert scales[t, g] == scale
        expected = torch.from_numpy(group / np.float32(scale)).to(torch.float8_e4m3fn).float()
        assert torch.equal(codes[t, g * 128 : g * 128 + len(group)], expected)
        assert (codes[t, g * 128 + len(group) : (g + 1) * 128] == 0).all()
    assert torch.equal(
        dequantized_rows(x), (codes.view(7, -1, 128) * scales[..., None]).view(7, -1)[:, :k]
    )


def test_a_row_does_not_know_its_neighbours() -> None:
    x = torch.randn(33, 320)
    codes, scales = quantize_rows(x)
    for rows in (slice(0, 1), slice(5, 22), slice(32, 33)):
        alone = quantize_rows(x[rows])
        assert torch.equal(alone[0], codes[rows]) and torch.equal(alone[1], scales[rows])


def test_c15_zero_rows() -> None:
    codes, scales = quantize_rows(torch.zeros(3, 256))
    assert codes.count_nonzero() == 0 and (scales > 0).all() and scales.isfinite().all()
    assert quantize_rows(torch.zeros(0, 256))[0].shape == (0, 256)


def test_nothing_saturates() -> None:
    x = torch.randn(64, 128) * torch.logspace(-20, 20, 64)[:, None]
    codes, scales = quantize_rows(x)
    assert (codes.abs() <= 448).all() and (scales[:, 0] * 448 >= x.abs().amax(1)).all()


def test_f18_the_gradient_is_straight_through() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    upstream = torch.randn(4, 8)
    kept = torch.tensor([-0.0, float("inf"), 1.0, 448.0]).repeat(2).expand(4, 8)
    out = RoundTrip.apply(x, kept)
    assert torch.equal(out, kept) and torch.equal(out.signbit(), kept.signbit())
    out.backward(upstream)
    assert x.grad is not None and torch.equal(x.grad, upstream)


@pytest.mark.parametrize("scale", [0.013, 0.5, 1.7e-4, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_static_scale_multiplies_by_its_reciprocal(scale: float, dtype: torch.dtype) -> None:
    """x * (1 / scale), both in float32, as samplers do it; a division would round otherwise now and then."""
    x = (torch.randn(200, 96) * scale * 300).to(dtype)
    held = torch.tensor(scale)
    codes = static_codes(x, held)
    reciprocal = np.float32(1) / np.float32(scale)
    product = torch.from_numpy(x.float().numpy() * reciprocal)
    expected = product.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert codes.dtype == torch.float32 and torch.equal(codes, expected)
    assert codes.abs().max() == 448 and (product.abs() > 448).any(), "some saturate"
    divided = (x.float() / held).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert (codes != divided).float().mean() < 0.01
