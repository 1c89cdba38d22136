"""The version rule: a forward reads what was committed, and a backward needs the master that its forward saw."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models.context import Weight
from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.model import LanguageModel
from unified_models.ops.grouped_linear import grouped_linear
from unified_models.ops.linear import linear
from unified_models.ops.linear.arithmetic import operand


def weight(*shape: int, **options: Any) -> Weight:
    made = Weight(*(part for size in shape for part in (None, size)), **options)
    made.label = "blocks.0.w"
    with torch.no_grad():
        made.master.copy_(torch.randn(shape))
    made.commit()
    return made


def use_linear(ctx: LocalContext) -> tuple[Weight, Tensor]:
    w = weight(8, 16, format="fp8_ue8m0")
    return w, ctx.linear(torch.randn(3, 16), w)


def use_groups(ctx: LocalContext) -> tuple[Weight, Tensor]:
    w = weight(8, 16, groups=2)
    return w, ctx.linear(torch.randn(3, 2, 16), w)


def use_experts(ctx: LocalContext) -> tuple[Weight, Tensor]:
    w = weight(2, 8, 16)
    return w, grouped_linear(torch.randn(3, 16), (1, 2), ctx.read(w))[0]


def use_embed(ctx: LocalContext) -> tuple[Weight, Tensor]:
    w = weight(8, 16)
    return w, ctx.embed(torch.tensor([1, 2, 2]), w)


def use_value(ctx: LocalContext) -> tuple[Weight, Tensor]:
    w = weight(8, format="float32")
    return w, ctx.read(w).value * 2


def by_optimizer(w: Weight) -> None:
    w.master.grad = torch.ones_like(w.master)
    torch.optim.SGD([w.master], lr=0.1).step()
    w.master.grad = None


def by_copy(w: Weight) -> None:
    with torch.no_grad():
        w.master.copy_(torch.zeros(w.shape))


def by_assign(w: Weight) -> None:
    w.assign(torch.zeros(w.shape))


def by_assigned_matrix(w: Weight) -> None:
    w.assign(torch.zeros(w.shape[1:]), index=0)


USES = [use_linear, use_groups, use_experts, use_embed, use_value]
CHANGES = [by_optimizer, by_copy, by_assign]
PAIRS = [(use, change) for use in USES for change in CHANGES] + [(use_experts, by_assigned_matrix)]


def names(fn: Callable) -> str:
    return fn.__name__.replace("_", "-")


@pytest.mark.parametrize(("use", "change"), PAIRS, ids=names)
def test_backward_after_a_change_is_refused(use: Callable, change: Callable) -> None:
    """Whether or not the change was committed before the backward."""
    for commit in (False, True):
        w, out = use(LocalContext(Step.of([3])))
        change(w)
        if commit:
            w.commit()
        with pytest.raises(
            RuntimeError, match=r"blocks\.0\.w: the master changed between forward and"
        ):
            out.float().sum().backward()
        assert w.master.grad is None


@pytest.mark.parametrize("use", USES, ids=names)
def test_backward_without_a_change(use: Callable) -> None:
    """Committing again the same master is no change; gradients that arrive are none either."""
    w, out = use(LocalContext(Step.of([3])))
    w.commit()
    out.float().sum().backward(retain_graph=True)
    first = w.master.grad.clone()
    out.float().sum().backward()
    assert torch.equal(w.master.grad, 2 * first)
    assert bool((first != 0).any())


@pytest.mark.parametrize("change", [by_optimizer, by_copy], ids=names)
def test_forward_on_newer_masters_is_refused(change: Callable) -> None:
    w = weight(8, 16, format="fp8_ue8m0")
    change(w)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.w: the master changed since the last comm"):
        w()
    w.commit()
    assert torch.equal(w().packed["codes"], w.format.pack(w.master)["codes"])


def test_forward_before_any_commit_is_refused() -> None:
    w = Weight(None, 4)
    with pytest.raises(RuntimeError, match="weight: the master was never committed; call model"):
        w()
    w.assign(torch.ones(4))
    w.bind("float32")
    with pytest.raises(RuntimeError, match="never committed"):
        w()


def test_assign_commits() -> None:
    """The whole, and one matrix of a stack: the packed bytes are those of a fresh weight."""
    for format in ("bfloat16", "fp8_ue8m0", "mxfp4"):
        w, new = weight(3, 8, 32, format=format), torch.randn(3, 8, 32)
        w.assign(new)
        for name, packed in w.format.pack(new).items():
            assert torch.equal(w().packed[name], packed)
        w.assign(new[0] + 1, index=2)
        new[2] = new[0] + 1
        for name, packed in w.format.pack(new).items():
            assert torch.equal(w().packed[name], packed)
        assert torch.equal(w.master, new)


def test_operand_is_made_once_for_each_commit() -> None:
    """A kernel's own form of the bytes is kept until they change; then no old copy answers."""
    w, x = weight(8, 16), torch.randn(2, 16)
    made = []
    first = linear(x, w())[0]
    w().operand(made.append)
    w().operand(made.append)
    kept = w().operand(operand)
    assert torch.equal(linear(x, w())[0], first)
    assert w().operand(operand) is kept
    w.assign(torch.zeros(8, 16))
    assert w().operand(operand).w is kept.w, "a recorded graph reads the old address"
    assert torch.equal(linear(x, w())[0], torch.zeros(2, 8, dtype=torch.bfloat16))
    assert len(made) == 1


def test_packed_bytes_keep_their_address() -> None:
    """Graphs remember addresses: a commit and an assign write in place."""
    w = weight(8, 32, format="mxfp4")
    before = {name: t.data_ptr() for name, t in w().packed.items()}
    w.assign(torch.randn(8, 32))
    by_copy(w)
    w.commit()
    assert {name: t.data_ptr() for name, t in w().packed.items()} == before


def test_one_step_sees_one_version() -> None:
    """A recomputation in the backward, too, runs under its step's context."""
    w, ctx = weight(8, 16), LocalContext(Step.of([1]))
    ctx.linear(torch.randn(1, 16), w)
    w.assign(torch.zeros(8, 16))
    with pytest.raises(RuntimeError, match=r"blocks\.0\.w: the master changed within one step"):
        ctx.linear(torch.randn(1, 16), w)
    LocalContext(Step.of([1])).linear(torch.randn(1, 16), w)


def test_writes_through_data_are_not_seen() -> None:
    """`.data` hides a write from torch's own version counter, so from ours (its docstring says so): commit by hand."""
    assert "`.data`" in (Weight.version.__doc__ or "")
    w = weight(4)
    w.master.data.zero_()
    assert not torch.equal(w().value, torch.zeros(4))
    w.commit()
    assert torch.equal(w().value, torch.zeros(4))


class OneWeight(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.w = weight(4, 4)


def test_commit_after_an_optimizer() -> None:
    """With the hook a step is followed by a commit; without it the next forward is refused."""
    for hooked in (True, False):
        model = OneWeight()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if hooked:
            model.commit_after(optimizer)
        model.w.master.grad = torch.ones(4, 4)
        optimizer.step()
        if hooked:
            assert torch.equal(model.w().value, model.w.master.bfloat16().float())
        else:
            with pytest.raises(RuntimeError, match="changed since the last commit"):
                model.w()


def test_without_a_master() -> None:
    w = weight(4, 4)
    value = w().value.detach().clone()
    w.drop_master()
    assert torch.equal(w().value, value)
    assert not w().value.requires_grad
    with pytest.raises(RuntimeError, match="holds packed bytes only"):
        w.commit()
    ctx = LocalContext(Step.of([1]))
    ctx.read(w)
    before = w.version
    w.assign(torch.ones(4, 4))
    assert torch.equal(w().value, torch.ones(4, 4))
    assert w.version != before
    with pytest.raises(RuntimeError, match="the master changed within one step"):
        ctx.read(w)
