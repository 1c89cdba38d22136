"""What two sides print about themselves, and what a process is refused for."""

import pytest
import torch

import unified_models as um
from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.fingerprint import Fingerprint
from unified_models.ops.linear.probe import NotExactError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "v4"
    um.make_tiny("deepseek_v4", folder, seed=0, num_hidden_layers=3)
    return folder


def test_equal_models_have_equal_fingerprints(folder):
    mine, theirs = (Fingerprint.of(um.load(folder)) for _ in range(2))
    Fingerprint.from_json(theirs.to_json()).require_same(mine)


@pytest.mark.parametrize("other", [{"numerics": "float32"}, {"weights": "file"}], ids=str)
def test_a_difference_is_refused_with_both_values(folder, other):
    mine, theirs = Fingerprint.of(um.load(folder)), Fingerprint.of(um.load(folder, **other))
    name, value = next(iter(other.items()))
    with pytest.raises(ValueError, match=f"{name}: .* here, {value} there"):
        mine.require_same(theirs)


def test_every_config_number_is_in_the_contract(folder, tmp_path):
    um.make_tiny("deepseek_v4", tmp_path / "other", num_hidden_layers=3, routed_scaling_factor=2.0)
    with pytest.raises(ValueError, match=r"contract: \w+ here, \w+ there"):
        Fingerprint.of(um.load(folder)).require_same(Fingerprint.of(um.load(tmp_path / "other")))


def test_kernel_files_are_listed_with_their_hashes(folder):
    kernels = Fingerprint.of(um.load(folder)).kernels
    assert "ops/linear/cpu.py" in kernels and "context/lists.py" in kernels
    assert not any("reference" in name for name in kernels)


def test_a_device_without_exact_backend_is_refused():
    with pytest.raises(RuntimeError, match="no exact backend for device 'meta'"):
        LocalContext(Step.of([1], device="meta"))


def test_autocast_is_refused():
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="autocast"):
        LocalContext(Step.of([1]))


def test_reduced_float32_products_are_refused():
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(NotExactError, match="'medium'"):
            LocalContext(Step.of([1]))
    finally:
        torch.set_float32_matmul_precision("highest")
