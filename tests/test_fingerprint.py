"""What two sides print about themselves, and what a process is refused for."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import unified_models as um
from unified_models import formats
from unified_models.context import BFLOAT16_RECORD, Rows
from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.fingerprint import Fingerprint
from unified_models.ops.linear.probe import NotExactError
from unified_models.registry import find
from unified_models.tiny import randomize

CONFIGS = Path(__file__).parent.parent / "configs/tiny"


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
    assert "ops/linear/arithmetic.py" in kernels and "context/lists.py" in kernels
    assert not any("reference" in name for name in kernels)


def hybrid(**changes):
    """A model with a scan and three number formats."""
    module = find("nemotron_h")
    raw = json.loads((CONFIGS / "nemotron_h_mixed.json").read_text())
    model = module.Model(module.Config.from_json(raw | changes))
    randomize(model, 0)
    return model


def changed(path, **values):
    """A change to the one slot or weight that ends in `path`; the config stays."""

    def change(model):
        parts = dict(model.weights()) | model.slots()
        (found,) = (part for name, part in parts.items() if name.endswith(path))
        for name, value in values.items():
            setattr(found, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed("blocks.0.mixer.state", chunk=32),
        changed("blocks.0.mixer.state", open=Rows(264, keep=16)),
        changed("blocks.3.mixer.keys_values", record=BFLOAT16_RECORD),
        changed("blocks.0.mixer.in_proj", format=formats.find("bfloat16")),
        changed("blocks.0.mixer.in_proj.input_scale", format=formats.find("bfloat16")),
        changed("blocks.1.mixer.experts.up", format=formats.find("nvfp4_four_over_six")),
        changed("blocks.3.mixer.k_scale", format=formats.find("bfloat16")),
    ],
    ids=lambda change: "-".join(str(c.cell_contents) for c in change.__closure__)[:40],
)
def test_every_slot_and_format_is_in_the_contract(change):
    mine, theirs = hybrid(), hybrid()
    Fingerprint.of(theirs).require_same(Fingerprint.of(mine))
    change(theirs)
    with pytest.raises(ValueError, match=r"contract: \w+ here, \w+ there"):
        Fingerprint.of(mine).require_same(Fingerprint.of(theirs))


def test_every_operator_and_format_file_is_listed():
    """Found by looking: each Python file of an operator or a format, references aside."""
    root = Path(um.__file__).parent
    kernels = Fingerprint.of(hybrid()).kernels
    for folder in ("ops", "formats"):
        files = [p for p in (root / folder).rglob("*.py") if p.name != "reference.py"]
        assert {str(p.relative_to(root)) for p in files} <= kernels.keys()
    for name in (
        "ops/scan/grid.py",
        "ops/attend/arithmetic.py",
        "ops/rounded.py",
        "formats/fp4.py",
    ):
        digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        assert digest.startswith(kernels[name]) and len(kernels[name]) == 16


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
