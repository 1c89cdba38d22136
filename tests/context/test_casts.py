"""Casting a model never touches what the architecture computes in float32, packed bytes, or tables of whole numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unified_models.context import Table, Weight

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda m: m.bfloat16(),
    "type": lambda m: m.type(torch.float64),
    "double": lambda m: m.double(),
    "to-float64": lambda m: m.to(torch.float64),
    "to-bfloat16-cpu": lambda m: m.to("cpu", torch.bfloat16),
    "float": lambda m: m.float(),
}


class Holder(nn.Module):
    """A router: its matrix in FP8, its bias in float32, its experts by token id; and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Weight(None, 256, None, 64, format="fp8_float32")
        self.experts = Weight(None, 2, None, 8, None, 64, format="mxfp4")
        self.bias = Weight(None, 256, format="float32", frozen=True)
        self.norm = Weight(None, 64)
        self.tid2eid = Table(None, 384, None, 1)
        with torch.no_grad():
            self.gate.master.copy_(torch.randn(256, 64))
            self.experts.master.copy_(torch.randn(2, 8, 64))
            self.bias.master.copy_(torch.linspace(6.82, 7.06, 256))
            self.norm.master.copy_(torch.randn(64))
        self.tid2eid.data.copy_(torch.arange(384)[:, None])
        for weight in (self.gate, self.experts, self.bias, self.norm):
            weight.commit()
            weight.master.grad = torch.ones_like(weight.master) * 1.001


def packed(model: Holder) -> dict[str, Tensor]:
    weights = {"gate": model.gate, "experts": model.experts, "bias": model.bias, "norm": model.norm}
    return {f"{label}.{name}": t for label, w in weights.items() for name, t in w().packed.items()}


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_cast_A14_A17(cast: Callable[[nn.Module], nn.Module]) -> None:
    model = Holder()
    before = {name: t.clone() for name, t in packed(model).items()}
    bias, table = model.bias.master.detach().clone(), model.tid2eid().clone()
    where = {name: t.data_ptr() for name, t in packed(model).items()}
    cast(model)
    after = packed(model)  # and a forward is still allowed
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)
    assert {name: t.data_ptr() for name, t in after.items()} == where
    assert same(model.bias.master.detach(), bias)
    assert model.bias.master.grad.dtype == torch.float32
    assert same(model.tid2eid(), table)
    assert model.tid2eid()[[255, 257, 383], 0].tolist() == [255, 257, 383]
    assert torch.equal(model.bias().value.argsort(), torch.arange(256))


@pytest.mark.parametrize("name", ["bfloat16", "double"])
def test_masters_and_their_gradients_are_cast_together(name: str) -> None:
    """The master of a packed weight follows, as an FSDP policy may ask; its gradient too."""
    model = Holder()
    CASTS[name](model)
    dtype = getattr(torch, name)
    for weight in (model.gate, model.experts, model.norm):
        assert weight.master.dtype == weight.master.grad.dtype == dtype


@pytest.mark.parametrize(
    ("format", "cast"),
    [("mxfp4", torch.float16), ("bfloat16", torch.float16), ("float32", torch.bfloat16)],
    ids=str,
)
def test_a_cast_that_could_pack_to_other_bytes_asks_for_a_commit(
    format: str, cast: torch.dtype
) -> None:
    """float16 cuts bf16's range, and bf16 cuts a float32 weight: the packed bytes are no longer the master's."""
    weight = Weight(None, 16, None, 32)
    weight.bind(format)
    with torch.no_grad():
        weight.master.copy_(torch.randn(16, 32) * 1e-7)
    weight.commit()
    weight.to(cast)
    with pytest.raises(RuntimeError, match="never committed"):
        weight()
    weight.commit()
    want = weight.format.pack(weight.master)
    assert all(torch.equal(weight().packed[name], t) for name, t in want.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_packing_again_after_a_cast_changes_nothing(dtype: torch.dtype) -> None:
    """Packed bytes are those of bf16(master), so a bfloat16 or wider master packs to the same ones."""
    model = Holder()
    before = {name: t.clone() for name, t in packed(model).items()}
    model.to(dtype)
    for weight in (model.gate, model.experts, model.norm):
        weight.commit()
    assert all(same(before[name], t) for name, t in packed(model).items())


def test_state_dict_holds_masters_and_tables_only() -> None:
    """Packed bytes are derived, so they are not saved."""
    names = {"gate.master", "experts.master", "bias.master", "norm.master", "tid2eid.data"}
    assert set(Holder().state_dict()) == names


def test_moving_to_another_device_and_back_keeps_a_meta_copy_honest() -> None:
    """A device move takes everything along: here to meta, where only shapes and dtypes remain."""
    model = Holder()
    model.to("meta")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert model.tid2eid.data.dtype == torch.int64
    assert model.bias.master.dtype == torch.float32
