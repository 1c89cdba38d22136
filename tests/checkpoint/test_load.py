"""Loading: strict both ways, exact, and nothing half done."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models import checkpoint


@pytest.fixture(params=["bfloat16", "fp8_ue8m0", "mxfp4"])
def state(toy: Any, request: pytest.FixtureRequest) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = toy.tensors(request.param, request.param)
    return tensors


def test_f15_f16_every_tensor_equals_the_file(
    toy: Any, loaded: Any, state: dict[str, Tensor]
) -> None:
    """Nothing is random, and nothing else ran after the load (d14)."""
    model = loaded(state)
    found = dict(checkpoint.named_tensors(model))
    assert set(found) == {name for name in state if not name.endswith(".scale")}
    for name, values in found.items():
        base = name.removesuffix(".weight")
        file = toy.oracle(state, base).float() if f"{base}.weight" in state else state[name]
        assert torch.equal(values, file), name
    model.commit()
    assert all(torch.equal(found[name], values) for name, values in checkpoint.named_tensors(model))


def test_f16_a_step_with_zero_rate_changes_nothing(loaded: Any, state: dict[str, Tensor]) -> None:
    model = loaded(state)
    before = {name: values.clone() for name, values in checkpoint.named_tensors(model)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.commit_after(optimizer)
    sum(weight().value.sum() for _, weight in model.weights()).backward()
    optimizer.step()
    assert all(
        torch.equal(before[name], values) for name, values in checkpoint.named_tensors(model)
    )


def test_what_is_trained(loaded: Any, state: dict[str, Tensor]) -> None:
    model = loaded(state)
    assert {w.master.dtype for _, w in model.weights()} == {torch.float32}
    assert all(w.master.requires_grad != w.frozen for _, w in model.weights())
    assert all(weight.committed == weight.version for _, weight in model.weights())
    assert model.blocks[1].proj.label == "blocks.1.proj"


@pytest.mark.parametrize("numerics", ["deployed", "float32"])
def test_e11_large_float32_values(toy: Any, loaded: Any, numerics: str) -> None:
    state = toy.tensors("float32")
    state["layers.0.proj.weight"] *= 1e6
    model = loaded(state, numerics=numerics)
    proj = model.blocks[0].proj
    assert torch.equal(proj.master, state["layers.0.proj.weight"]), (
        "the master keeps float32 values"
    )
    assert proj.master.abs().max() > 65504
    expected = proj.master if numerics == "float32" else proj.master.bfloat16().float()
    assert torch.equal(proj().value, expected)
    changed = {change.name: change for change in model.load_report.changed}
    assert ("layers.0.proj.weight" in changed) == (numerics == "deployed")
    if changed:
        change = changed["layers.0.proj.weight"]
        assert change.blocks == toy.N * toy.M and 0 < change.largest < 2**-8


def test_e11_half_precision_files(toy: Any, loaded: Any) -> None:
    state = toy.tensors("float16")
    proj = loaded(state).blocks[0].proj
    assert proj.format.name == "bfloat16"
    assert torch.equal(proj.master, state["layers.0.proj.weight"].float())


def test_float32_numerics_quantises_nothing(toy: Any, loaded: Any) -> None:
    model = loaded(toy.tensors("fp8_float32", "mxfp4"), numerics="float32")
    assert model.numerics == "float32"
    assert {weight.format.name for _, weight in model.weights()} == {"float32"}
    assert all(torch.equal(w().value, w.master) for _, w in model.weights())


def test_a14_a_float32_parameter_stays_float32(toy: Any, loaded: Any, tmp_path: Path) -> None:
    """Router biases near 7: bfloat16 has steps of 0.03 there."""
    state = toy.tensors(count=256)
    bias = state["layers.1.gate.bias"]
    assert bias.min() >= 6.82 and bias.max() <= 7.06
    order = bias.argsort(stable=True)
    assert not torch.equal(bias.bfloat16().float().argsort(stable=True), order)
    model = loaded(state, config={"num_experts": 256})

    def exact(model: Any) -> bool:
        weight = model.blocks[1].bias
        kept = weight.master.dtype == weight().value.dtype == torch.float32
        return kept and torch.equal(weight.master, bias) and torch.equal(weight().value, bias)

    assert exact(model)
    model.bfloat16()
    assert exact(model) and model.blocks[0].proj.master.dtype == torch.bfloat16
    checkpoint.save(model, tmp_path / "saved")
    again = checkpoint.load(tmp_path / "saved")
    assert exact(again)
    checkpoint.update(again, list(checkpoint.named_tensors(model)))
    assert exact(again)


def test_a14_a_16_bit_file_of_a_float32_parameter_is_stated(toy: Any, loaded: Any) -> None:
    state = toy.tensors()
    state["layers.1.gate.bias"] = state["layers.1.gate.bias"].bfloat16()
    model = loaded(state)
    assert model.load_report.widened == ("layers.1.gate.bias",)
    assert torch.equal(model.blocks[1].bias.master, state["layers.1.gate.bias"].float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a17_table_entries_are_whole_numbers(
    toy: Any, loaded: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    state = toy.tensors()
    table = state["layers.0.gate.tid2eid"]
    table[0, 0], table[1, 1], table[toy.V - 1, 0] = 255, 257, 383
    state["layers.0.gate.tid2eid"] = table.to(dtype)
    model = loaded(state).bfloat16()
    assert model.blocks[0].table.data.dtype == torch.int64
    checkpoint.save(model, tmp_path / "saved")
    for found in (model, checkpoint.load(tmp_path / "saved")):
        assert torch.equal(found.blocks[0].table.data, table)


@pytest.mark.parametrize("value", [-1, 384, 2**40])
def test_a17_an_entry_that_names_no_expert_stops(toy: Any, loaded: Any, value: int) -> None:
    state = toy.tensors()
    state["layers.1.gate.tid2eid"][3, 1] = value
    with pytest.raises(
        ValueError, match=rf"layers\.1\.gate\.tid2eid\[3, 1\] is {value}, expected 0 to 383"
    ):
        loaded(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a17_a_table_of_another_dtype_stops(toy: Any, loaded: Any, dtype: torch.dtype) -> None:
    state = toy.tensors()
    state["layers.1.gate.tid2eid"] = state["layers.1.gate.tid2eid"].to(dtype)
    with pytest.raises(
        ValueError, match=r"layers\.1\.gate\.tid2eid is \w+, expected I64 or I32 for a table"
    ):
        loaded(state)


def test_c25_a_missing_table_stops(toy: Any, loaded: Any) -> None:
    state = toy.tensors()
    del state["layers.0.gate.tid2eid"]
    with pytest.raises(ValueError, match=r"missing \(1\): layers\.0\.gate\.tid2eid"):
        loaded(state)


def test_c05_a_draft_head_is_skipped_by_rule(toy: Any, loaded: Any) -> None:
    state = toy.tensors()
    state |= {"mtp.0.proj.weight": torch.zeros(2), "model.mtp.0.norm.weight": torch.zeros(2)}
    report = loaded(state).load_report
    assert report.skipped == {
        "mtp.0.proj.weight": "draft head",
        "model.mtp.0.norm.weight": "draft head",
    }
    assert "2 skipped by rule: draft head" in str(report)


def test_c06_missing_and_unused_names_are_listed(toy: Any, loaded: Any) -> None:
    state = toy.tensors()
    gone = ["layers.0.norm.weight", "layers.1.hc_fn", "layers.1.experts.3.w1.weight"]
    for name in gone:
        del state[name]
    state |= {"layers.0.nrom.weight": torch.zeros(2), "lm_head.weight": torch.zeros(2)}
    with pytest.raises(ValueError) as error:
        loaded(state)
    told = str(error.value)
    assert "missing (3): " in told and all(name in told for name in gone)
    assert "unused (2): layers.0.nrom.weight, lm_head.weight" in told


def test_every_problem_is_told_at_once(toy: Any, loaded: Any) -> None:
    state = toy.tensors("fp8_ue8m0")
    state["layers.0.norm.weight"] = torch.zeros(toy.M + 1)
    state["layers.1.gate.tid2eid"] = torch.zeros(toy.V, 3, dtype=torch.int64)
    del state["layers.1.proj.scale"]
    with pytest.raises(ValueError, match="does not fit toy") as error:
        loaded(state)
    told = str(error.value)
    assert "layers.0.norm.weight is F32 (161,), expected (160,)" in told
    assert "layers.1.gate.tid2eid is (24, 3), expected (24, 2)" in told
    assert "layers.1.proj.weight is F8_E4M3 and its scale is missing" in told


def test_e10_experts_of_one_rank_are_not_all_experts(toy: Any, loaded: Any, tmp_path: Path) -> None:
    """A checkpoint that holds a rank's experts, renumbered from 0, is not a whole one."""
    state = toy.tensors()
    half = {
        name: t
        for name, t in state.items()
        if ".experts.2." not in name and ".experts.3." not in name
    }
    with pytest.raises(ValueError, match=r"missing \(12\): layers\.0\.experts\.2\.w1\.weight"):
        loaded(half)


def test_e10_experts_filled_with_their_index(toy: Any, loaded: Any) -> None:
    state = toy.tensors()
    for name, tensor in state.items():
        if ".experts." in name:
            tensor.fill_(int(name.split(".")[3]))
    model = loaded(state)
    for e in range(toy.E):
        for part in ("gate", "up", "down"):
            assert (model.blocks[1].get_submodule(part)().value[e] == e).all()


def test_a23_a_changed_file_is_read_again(toy: Any, tmp_path: Path) -> None:
    state = toy.tensors()
    folder = toy.write(tmp_path / "checkpoint", state)
    first = checkpoint.load(folder)
    state["layers.0.proj.weight"] += 1
    toy.write(folder, state)
    assert torch.equal(
        checkpoint.load(folder).blocks[0].proj.master, state["layers.0.proj.weight"].float()
    )
    assert not torch.equal(first.blocks[0].proj.master, state["layers.0.proj.weight"].float())


def test_e05_nothing_is_read_before_headers_agree(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = toy.tensors()
    del state["head.weight"]
    folder = toy.write(tmp_path / "checkpoint", state)

    def forbidden(*_: Any) -> None:
        pytest.fail("a tensor was read")

    monkeypatch.setattr("unified_models.checkpoint.shards.Shards.read", forbidden)
    with pytest.raises(ValueError, match=r"missing \(1\): head\.weight"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"weights": "files"}, "weights must be one of master, packed, file, got 'files'"),
        ({"weights": "file", "numerics": "float32"}, "numerics is 'float32'"),
        ({"numerics": "fp32"}, "numerics must be 'deployed' or 'float32', got 'fp32'"),
    ],
)
def test_arguments(toy: Any, loaded: Any, options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        loaded(toy.tensors(), **options)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, r"config\.json: no such file"),
        ("nonsense", r"config\.json: not JSON"),
        ("[]", r"config\.json: expected a JSON object"),
        ("{}", r"config\.json: missing key 'model_type'"),
        (
            json.dumps({"model_type": "deepseek_v5"}),
            r"unknown architecture 'deepseek_v5'; known: .*deepseek_v4",
        ),
    ],
)
def test_g03_which_architecture(toy: Any, tmp_path: Path, text: str | None, complaint: str) -> None:
    folder = toy.write(tmp_path / "checkpoint", toy.tensors())
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        checkpoint.load(folder)


def test_the_bar_appears_on_terminals_after_a_while(
    toy: Any, loaded: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr("unified_models.progress.PATIENCE", -1.0)
    monkeypatch.setattr("unified_models.progress.Progress.start", lambda bar: shown.append(bar))
    loaded(toy.tensors())
    assert shown == [], "not a terminal"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    loaded(toy.tensors(), progress=False)
    assert shown == []
    loaded(toy.tensors())
    (bar,) = shown
    (task,) = bar.tasks
    assert task.completed == task.total > 0


def test_the_report_counts(toy: Any, loaded: Any) -> None:
    state = toy.tensors("fp8_ue8m0", "mxfp4")
    report = loaded(state).load_report
    assert report.read_bytes == sum(t.numel() * t.dtype.itemsize for t in state.values())
    assert report.tensors == sum(not name.endswith(".scale") for name in state)
    assert report.seconds > 0 and report.peak_bytes > 10_000_000
