"""The sync list, and weight updates in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models import checkpoint

KINDS = (
    "bfloat16",
    "fp8_ue8m0",
    "fp8_float32",
    "mxfp4",
    "fp8_tensor",
    "nvfp4",
    "nvfp4_four_over_six",
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def everything(model: Any) -> dict[str, Tensor]:
    """A copy of every tensor of a model, packed bytes included."""
    return {
        name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())
    }


def test_a16_the_list_holds_everything_that_is_read(toy: Any, loaded: Any) -> None:
    model = loaded(toy.tensors("fp8_ue8m0", "mxfp4"))
    names = [name for name, _ in checkpoint.named_tensors(model)]
    assert len(names) == len(set(names)) == 2 + 2 * (5 + 3 * toy.E)
    assert names[0] == "embed.weight" and names[-1] == "head.weight"
    held = sum(t.numel() for _, t in checkpoint.named_tensors(model))
    parameters = sum(p.numel() for p in model.parameters())
    assert held == parameters + sum(table.data.numel() for _, table in model.tables())
    assert all(not t.requires_grad for _, t in checkpoint.named_tensors(model))


def test_a16_tables_arrive(toy: Any, loaded: Any) -> None:
    a, b = loaded(toy.tensors()), loaded(toy.tensors(seed=1))
    a.blocks[1].table.data[0, 0], a.blocks[1].table.data[toy.V - 1, 1] = 383, 255
    assert not torch.equal(a.blocks[1].table(), b.blocks[1].table())
    checkpoint.update(b, checkpoint.named_tensors(a))
    assert torch.equal(a.blocks[1].table(), b.blocks[1].table())


def test_a37_the_list_is_streamed(toy: Any, loaded: Any, kind: str) -> None:
    """Experts come one at a time, as views of the master: nothing is stacked or copied."""
    model = loaded(toy.tensors(kind, kind))
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages |= {table.data.untyped_storage().data_ptr() for _, table in model.tables()}
    for name, values in checkpoint.named_tensors(model):
        assert values.untyped_storage().data_ptr() in storages, name
        assert ".experts." not in name or values.ndim == (0 if "input" in name else 2)


def test_packed_only_lists_what_it_holds(toy: Any, loaded: Any, kind: str) -> None:
    state = toy.tensors(kind, kind)
    for name, values in checkpoint.named_tensors(loaded(state, weights="file")):
        if name.endswith(("proj.weight", "w2.weight")) and "layers.0" in name:
            assert torch.equal(
                values.float(), toy.oracle(state, name.removesuffix(".weight")).float()
            )


@pytest.mark.parametrize("weights", ["master", "file"])
def test_a27_a28_an_update_equals_a_fresh_load(
    toy: Any, loaded: Any, same: Callable[..., bool], pointers: Any, kind: str, weights: str
) -> None:
    new, old = (
        loaded(toy.tensors(kind, kind, seed=1)),
        loaded(toy.tensors(kind, kind), weights=weights),
    )
    old.blocks[0].steps.fill_(7)
    child = old.blocks[1].proj
    old.alias = child
    where = pointers(old)
    for _, weight in old.weights():
        weight().value  # noqa: B018
        weight.operand(weight(), lambda reading: reading.dequantized())
    checkpoint.update(old, checkpoint.named_tensors(new))
    assert pointers(old) == where, "no storage moved"
    assert old.weights_from == "master"
    assert old.alias is child and old.blocks[0].steps == 7, "aliases and running buffers stay"
    for (path, a), (_, b) in zip(new.weights(), old.weights(), strict=True):
        assert all(same(a().packed[name], b().packed[name]) for name in a.packed_names), path
        assert torch.equal(b.operand(b(), lambda reading: reading.dequantized()), a().dequantized())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a26_the_same_weights_three_times(
    toy: Any, loaded: Any, same: Callable[..., bool], kind: str, dtype: torch.dtype
) -> None:
    """And whether a trainer sends float32 or bfloat16 masters makes no difference to packed bytes."""
    a, b = loaded(toy.tensors(kind, kind)), loaded(toy.tensors(kind, kind, seed=1))
    for _, weight in a.weights():
        weight.assign(weight.master + torch.randn(weight.shape) / 1000)
    seen = []
    for _ in range(3):
        sent = (
            (name, t.to(dtype) if name.endswith(".weight") else t)
            for name, t in checkpoint.named_tensors(a)
        )
        checkpoint.update(b, sent)
        seen.append({path: weight().dequantized() for path, weight in b.weights()})
    for (path, x), (_, y) in zip(a.weights(), b.weights(), strict=True):
        assert all(same(x().packed[name], y().packed[name]) for name in x.packed_names), path
        assert same(seen[0][path], seen[1][path]) and same(seen[0][path], seen[2][path])


def test_a34_experts_keep_their_place_and_their_halves(toy: Any, loaded: Any, kind: str) -> None:
    model = loaded(toy.tensors(kind, kind))
    sent = []
    for name, values in checkpoint.named_tensors(model):
        if ".experts." in name and "input" not in name:
            sign = {"w1": 1, "w3": -1, "w2": 2}[name.split(".")[4]]
            values = torch.full_like(values, sign * int(name.split(".")[3]))
        sent.append((name, values))
    checkpoint.update(model, reversed(sent))
    for e in range(toy.E):
        for part, sign in (("gate", 1), ("up", -1), ("down", 2)):
            assert (model.blocks[1].get_submodule(part)().value[e] == sign * e).all()
    assert dict(sent).keys() == dict(checkpoint.named_tensors(model)).keys()
    for name, values in checkpoint.named_tensors(model):
        assert torch.equal(values, dict(sent)[name])


def test_part_of_the_list(toy: Any, loaded: Any, kind: str) -> None:
    model = loaded(toy.tensors(kind, kind))
    before = everything(model)
    new = torch.full((toy.F, toy.M), 3.0)
    with pytest.raises(ValueError, match=r"missing \(\d+\): embed\.weight"):
        checkpoint.update(model, [("layers.0.experts.2.w1.weight", new)])
    checkpoint.update(model, [("layers.0.experts.2.w1.weight", new)], strict=False)
    for name, tensor in everything(model).items():
        changed = tensor != before[name]
        if name.startswith("blocks.0.gate.") and "input_scale" not in name:
            assert not changed[[0, 1, 3]].any() and changed[2].any()
        else:
            assert not changed.any(), name
    assert (model.blocks[0].gate().value[2] == 3).all()


def test_a_part_is_committed_with_the_rest(toy: Any, loaded: Any) -> None:
    """One expert is sent while the optimizer has moved the others."""
    model = loaded(toy.tensors(experts="mxfp4"))
    gate = model.blocks[0].gate
    with torch.no_grad():
        gate.master.fill_(2.0)
    checkpoint.update(
        model, [("layers.0.experts.2.w1.weight", torch.ones(toy.F, toy.M))], strict=False
    )
    assert (gate().value[2] == 1).all() and (gate().value[[0, 1, 3]] == 2).all()


def test_a_forward_before_an_update_has_no_backward_after_it(
    toy: Any, loaded: Any, kind: str
) -> None:
    model = loaded(toy.tensors(kind, kind))
    loss = model.blocks[0].proj().value.sum() + model.blocks[0].gate().value.sum()
    checkpoint.update(model, [("layers.0.proj.weight", torch.ones(toy.N, toy.M))], strict=False)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.proj: the master changed between"):
        loss.backward()


@pytest.mark.parametrize(
    ("name", "values", "complaint"),
    [
        ("head.weight", torch.zeros(24, 161), r"head\.weight is \(24, 161\), expected \(24, 160\)"),
        ("head.weight", torch.zeros(160, 24), r"head\.weight is \(160, 24\)"),
        (
            "head.weight",
            torch.zeros(24, 160).long(),
            r"is torch\.int64, expected float32, bfloat16",
        ),
        (
            "head.weight",
            torch.zeros(24, 160).double(),
            r"is torch\.float64, expected float32, bfloat16",
        ),
        (
            "layers.0.gate.bias",
            torch.zeros(4).bfloat16(),
            r"bias is torch\.bfloat16, expected float32",
        ),
        ("layers.0.gate.tid2eid", torch.zeros(24, 2), r"is torch\.float32, expected whole numbers"),
        (
            "layers.0.gate.tid2eid",
            torch.full((24, 2), 384),
            r"tid2eid\[0, 0\] is 384, expected 0 to 383",
        ),
        ("layers.0.gate.tid2eid", torch.full((24, 2), -1), r"tid2eid\[0, 0\] is -1"),
        (
            "layers.0.experts.3.w2.weight",
            torch.zeros(4, 160, 32),
            r"is \(4, 160, 32\), expected \(160, 32\)",
        ),
    ],
)
def test_a14_a17_what_does_not_fit_changes_nothing(
    toy: Any, loaded: Any, name: str, values: Tensor, complaint: str
) -> None:
    model = loaded(toy.tensors("fp8_ue8m0", "mxfp4"))
    new = [(n, values if n == name else t + 1) for n, t in checkpoint.named_tensors(model)]
    before = everything(model)
    versions = [weight.version for _, weight in model.weights()]
    with pytest.raises(ValueError, match=rf"the update was not applied\n.*{complaint}"):
        checkpoint.update(model, new)
    after = everything(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert versions == [weight.version for _, weight in model.weights()]


def test_names_that_do_not_fit_change_nothing(toy: Any, loaded: Any) -> None:
    model = loaded(toy.tensors())
    before = everything(model)
    new = [(name, values + 1) for name, values in checkpoint.named_tensors(model)]
    given = [
        *new[1:],
        new[5],
        ("layers.9.norm.weight", torch.zeros(2)),
        ("mtp.0.x", torch.zeros(1)),
    ]
    with pytest.raises(ValueError) as error:
        checkpoint.update(model, given)
    told = str(error.value)
    assert "missing (1): embed.weight" in told
    assert "unknown (1): layers.9.norm.weight" in told, "mtp is skipped by rule"
    assert f"{new[5][0]} is given twice" in told
    with pytest.raises(ValueError, match="given twice"):
        checkpoint.update(model, [*new, (f"model.{new[5][0]}", new[5][1])])
    assert all(torch.equal(before[key], tensor) for key, tensor in everything(model).items())


def test_a_generator_that_fails_changes_nothing(toy: Any, loaded: Any) -> None:
    model = loaded(toy.tensors())
    before = everything(model)

    def breaking() -> Any:
        for i, (name, values) in enumerate(checkpoint.named_tensors(model)):
            if i == 9:
                raise ConnectionError("the trainer went away")
            yield name, values + 1

    with pytest.raises(ConnectionError):
        checkpoint.update(model, breaking())
    assert all(torch.equal(before[key], tensor) for key, tensor in everything(model).items())
