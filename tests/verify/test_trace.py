"""The finder of the first difference: digests, program order, module paths, and the operator and token it names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unified_models.context.step import Step
from unified_models.training import logprobs
from unified_models.verify import Fault, Trace, UnequalError, control, locate, recording
from unified_models.verify.digest import digest
from unified_models.verify.drive import drive
from unified_models.verify.locate import compare
from unified_models.verify.trace import Call, one_ulp
from unified_models.verify.watch import Watch


def trained(model: Any, sequences: list[list[int]], **options: Any) -> Callable[[Trace], None]:
    """A run of the training forward."""

    def run(trace: Trace) -> None:
        with recording(model, trace), torch.no_grad():
            context = Watch(model, trace=trace).pack(range(len(sequences)))
            logprobs(model, sequences, context=context, **options)

    return run


def scored(model: Any, sequences: list[list[int]], **options: Any) -> Callable[[Trace], None]:
    """A run of the engine."""

    def run(trace: Trace) -> None:
        with recording(model, trace):
            Watch(model, trace=trace).engine(range(len(sequences)), **options).score(sequences)

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_digest_sees_every_element(dtype: torch.dtype) -> None:
    rows = torch.randint(2, (4, 3, 5)).to(dtype)
    before = digest([rows])
    for column in range(15):
        other = rows.clone()
        flat = other[2].view(-1)
        flat[column] = 1 - flat[column].int()
        after = digest([other])
        assert (before != after).tolist() == [False, False, True, False]


def test_digest_tells_sign_of_zero_and_tensors_apart() -> None:
    zero = torch.zeros(1, 2)
    assert digest([zero]) != digest([-zero])
    assert digest([zero, zero + 1]) != digest([zero + 1, zero])
    assert digest([torch.zeros(0, 3)]).shape == (0,)
    assert torch.equal(digest([zero.expand(9, 2)]), digest([zero]).expand(9))


def test_one_ulp() -> None:
    row = torch.tensor([1.0, -1.0, 0.0, 3e-5])
    for x in (row, row.bfloat16()):
        moved = one_ulp(x)
        assert moved.dtype == x.dtype
        assert (moved != x).all()
        assert (moved.float().abs() > x.float().abs()).all()
        assert (moved.float() - x.float()).abs().max() <= 2**-7
    assert one_ulp(torch.tensor([3, 1])).tolist() == [1, 3]
    assert one_ulp(torch.tensor([3])).tolist() == [2]
    assert one_ulp(torch.tensor([0, 0])).tolist() == [1, 1]


def test_c28_trainer_and_engine_call_the_same_operators(micro: Any, draw: Any) -> None:
    """In the same order: the training forward, a prefill, and each step of a decode."""
    sequences = draw(20, 1, 2)
    traces = [Trace() for _ in range(3)]
    trained(micro, sequences)(traces[0])
    scored(micro, sequences)(traces[1])
    scored(micro, sequences, step_tokens=1)(traces[2])
    first = [str(call) for call in traces[0].digests]
    assert len(first) > 60
    assert first[:2] == ["model embed", "blocks.0.hc_attn linear"]
    assert first[-2:] == ["logits linear", "logits log_softmax"]
    assert "blocks.1.attention.indexer.compressor compress" in first
    for trace in traces[1:]:
        assert [str(call) for call in trace.digests] == first
        assert not trace.blind
        told = compare(traces[0], trace)
        assert told.first is None
        assert told.rows > 19 * len(first) / 2


def test_c28_another_order_of_operators_is_an_error(micro: Any, draw: Any) -> None:
    a, b = Trace(), Trace()
    run = trained(micro, draw(3))
    run(a)
    run(b)
    b.digests[Call("blocks.0", "swiglu", 7)] = {}
    with pytest.raises(UnequalError, match=r"\d+ operator calls in one run and \d+ in the other"):
        compare(a, b)
    first = next(iter(b.digests))
    b.digests[first] = b.digests.pop(first)
    with pytest.raises(UnequalError, match="operator call 0 is model embed in one run and"):
        compare(a, b)


def test_nothing_in_common_is_an_error(micro: Any, draw: Any) -> None:
    a = Trace()
    trained(micro, draw(3))(a)
    with pytest.raises(UnequalError, match="nothing was compared"):
        compare(a, a, sequences=[7])


def test_locate_names_the_operator_and_the_token(micro: Any, draw: Any, faulty: Any) -> None:
    sequences = draw(9, 40, 23)
    assert locate(trained(micro, sequences), scored(micro, sequences)) is None
    faulty("attend_latent", 21)
    alone = sequences[1]
    found = locate(trained(micro, [alone]), scored(micro, [alone, *sequences], step_tokens=7))
    assert found is not None
    assert found.call == Call("blocks.0.attention", "attend_latent")
    assert found.place == (0, 21)
    assert found.bits.unequal == found.bits.compared == 4 * 32
    assert str(found).startswith(
        "blocks.0.attention attend_latent, sequence 0 token 21: 128 of 128 unequal, first at"
    )


def test_a_module_path_survives_a_failed_forward(micro: Any) -> None:
    trace = Trace()
    with recording(micro, trace):
        with pytest.raises(ValueError, match="token id 999"):
            micro(torch.tensor([999]), Watch(micro, trace=trace).pack([0])(Step.of([1])))
        assert not trace._path
    assert "logits" not in vars(micro)
    assert not micro._forward_hooks


def test_copies_of_a_sequence_are_told_apart(micro: Any, draw: Any) -> None:
    """Their rows have equal bits; each is read once."""
    (sequence,) = draw(5)
    trace = Trace()
    with recording(micro, trace):
        drive(Watch(micro, trace=trace), [0, 1, 2], [sequence] * 3, lambda *_: 2)
    rows = trace.digests[Call("logits", "log_softmax")]
    assert sorted(rows) == [(s, p) for s in range(3) for p in range(4)]


def test_a_fault_strikes_one_row(micro: Any, draw: Any) -> None:
    sequences = draw(6, 9)
    clean, struck = Trace(), Trace(fault=Fault(Call("blocks.1", "rms_norm", 1), (1, 4)))
    trained(micro, sequences)(clean)
    trained(micro, sequences)(struck)
    assert struck.struck
    told = compare(clean, struck)
    assert told.first == (Call("blocks.1", "rms_norm", 1), (1, 4))
    parted = {
        p
        for call in clean.digests
        for p, d in clean.digests[call].items()
        if struck.digests[call][p] != d
    }
    assert {s for s, _ in parted} == {1}
    assert min(p for _, p in parted) == 4


def test_control_names_every_kind_of_operator(micro: Any, draw: Any) -> None:
    result = control(micro, draw(29)[0])
    assert not list(result.faults())
    names = {injection.fault.call.operator for injection in result.injections}
    assert names >= {
        "embed",
        "linear",
        "attend_latent",
        "compress",
        "select",
        "choose",
        "moe",
        "rms_norm",
        "rope",
    }
    assert all(injection.found for injection in result.injections)
    assert result.reached
    assert f"named {len(names)} of {len(names)}, reached the logprobs: " in str(result)


def test_control_fails_where_the_finder_is_blind(
    micro: Any, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "unified_models.verify.trace.digest",
        lambda rows: torch.zeros(len(rows[0]), dtype=torch.int64),
    )
    told = list(control(micro, draw(29)[0]).faults())
    assert any("was not named, but nothing" in line for line in told)
