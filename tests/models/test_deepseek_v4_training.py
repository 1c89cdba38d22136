"""DeepSeek-V4 in training: gradients, packing, chunks of rows, recomputation, and what an optimizer changes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import unified_models as um
from unified_models.weight import Weight


def bits(x: Tensor) -> Tensor:
    return x.detach().view(torch.int32)


def trainable(model: Any) -> dict[str, Tensor]:
    return {path: w.master for path, w in model.weights() if not w.frozen}


def loss_and_gradients(model: Any, sequences: list, **options: Any) -> tuple[Tensor, dict]:
    """The packed logprobs, and the gradient of a fixed weighting of them."""
    lps = torch.cat(um.logprobs(model, sequences, **options))
    weights = torch.linspace(-1, 1, len(lps))
    grads = torch.autograd.grad((lps * weights).sum(), list(trainable(model).values()))
    return lps.detach(), dict(zip(trainable(model), grads, strict=True))


def test_backward_against_float64(tiny, plain, tokens) -> None:
    """Every gradient of the whole model against autograd of plain float64 maths. Tolerance: relative to each tensor's
    norm, float32 through four blocks and back; measured 8e-6 at most (2026-11)."""
    model, ids = tiny("float32"), tokens(70)
    truth = plain(model)
    um.logprobs(model, [ids])[0].square().sum().backward()
    truth.logprobs(ids).square().sum().backward()
    checked = 0
    for path, master in trainable(model).items():
        want = truth.w[path].grad
        assert want.norm() > 0, f"{path}: nothing is tested"
        assert (master.grad.double() - want).norm() < 1e-4 * want.norm(), path
        checked += 1
    frozen = [w for _, w in model.weights() if w.frozen]
    assert checked + len(frozen) == len(list(model.weights()))
    assert all(w.master.grad is None for w in frozen)


def test_plain_gradient_by_finite_differences(tiny, plain, tokens) -> None:
    """The float64 maths itself: along random directions through all weights, central differences of step 1e-5 lose
    1e-10 to rounding and 1e-10 to the third derivative."""
    truth, ids = plain(tiny("float32")), tokens(40)
    leaves = [w for path, w in truth.w.items() if "indexer" not in path and "bias" not in path]
    grads = torch.autograd.grad(truth.logprobs(ids).sum(), leaves)
    masters = [w.detach().clone() for w in leaves]
    for _ in range(3):
        direction = [torch.randn_like(w) for w in leaves]
        slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                for w, old, d in zip(leaves, masters, direction, strict=True):
                    w.copy_(old + step * d)
                values.append(truth.logprobs(ids).sum().item())
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope.item(), rel=1e-5)


def test_gradient_by_finite_differences(tiny, tokens) -> None:
    """The float32 model itself, along its gradient and two random mixes with it: the loss moves by about 1e-2 and is
    known to 1e-5 (its sum's ulps), so slopes are known to some 1e-3; 1e-2 is asked."""
    model, ids = tiny("float32"), tokens(40)

    def loss() -> Tensor:
        return um.logprobs(model, [ids])[0].mean()

    params = trainable(model)
    grads = torch.autograd.grad(loss(), list(params.values()))
    masters = [w.detach().clone() for w in params.values()]
    size = math.sqrt(sum(float(g.square().sum()) for g in grads))
    for mix in (0.0, 1e-3, 1e-3):
        direction = [g / size + mix * torch.randn_like(g) for g in grads]
        slope = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
        h, values = 5e-3 / slope, []
        for step in (h, -h):
            with torch.no_grad():
                for w, old, d in zip(params.values(), masters, direction, strict=True):
                    w.copy_(old + step * d)
                model.commit()
                values.append(loss().item())
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_deployed_backward_reaches_every_weight(tiny, tokens, experts: str) -> None:
    """Finite, of the master's dtype, and not all zero; the indexer and the router's bias get none."""
    model = tiny(expert_dtype=experts)
    _, grads = loss_and_gradients(model, [tokens(60, 1), tokens(33, 2)])
    for path, master in trainable(model).items():
        assert grads[path].dtype == master.dtype == torch.float32
        assert bool(grads[path].isfinite().all()), path
        assert bool((grads[path] != 0).any()), path
    frozen = {path for path, w in model.weights() if w.frozen}
    assert {path.split(".")[-1] for path in frozen} == {
        *("wq_b", "weights_proj", "wkv", "wgate", "ape", "norm", "bias")
    }
    assert all("indexer" in path or path.endswith("ffn.bias") for path in frozen)
    assert all(w.master.grad is None for _, w in model.weights())


def test_deployed_gradient_is_near_that_of_float32(tiny, tokens) -> None:
    """Straight-through: quantisation moves the point, not the rule. Choices may flip, so only a direction is asked."""
    sequences = [tokens(50, 3)]
    _, exact = loss_and_gradients(tiny("float32"), sequences)
    _, coarse = loss_and_gradients(tiny(), sequences)
    a, b = (torch.cat([g.flatten() for g in grads.values()]) for grads in (exact, coarse))
    assert torch.nn.functional.cosine_similarity(a, b, 0) > 0.8


GROUPINGS = {
    "one": [[0], [1], [2], [3], [4], [5]],
    "twos": [[0, 1], [2, 3], [4, 5]],
    "all": [[0, 1, 2, 3, 4, 5]],
    "reversed": [[5, 4, 3, 2, 1, 0]],
    "odd": [[3, 0, 5], [1], [4, 2]],
}


@pytest.mark.parametrize("groups", GROUPINGS.values(), ids=GROUPINGS)
def test_any_micro_batch_A06_F04_F05(tiny, tokens, groups: list[list[int]]) -> None:
    """Documents of 1, 3, 7, 100, 200 and 2 tokens, packed in any way: the bits that each has alone."""
    model = tiny()
    sequences = [tokens(n, n) for n in (1, 3, 7, 100, 200, 2)]
    with torch.no_grad():
        alone = [um.logprobs(model, [s])[0] for s in sequences]
        compared = 0
        for group in groups:
            for i, got in zip(
                group, um.logprobs(model, [sequences[i] for i in group]), strict=True
            ):
                assert torch.equal(bits(got), bits(alone[i])), f"sequence {i} of {group}"
                compared += len(got)
    assert compared == sum(len(s) - 1 for s in sequences)


def test_packed_gradients_are_the_sum_F05(tiny, tokens) -> None:
    """Two documents packed, against each alone: the gradients add up (float32 sums in another order: 1e-5)."""
    model, sequences = tiny("float32"), [tokens(30, 4), tokens(50, 5)]
    params = list(trainable(model).values())
    packed = torch.autograd.grad(torch.cat(um.logprobs(model, sequences)).sum(), params)
    alone = [torch.autograd.grad(um.logprobs(model, [s])[0].sum(), params) for s in sequences]
    for got, a, b in zip(packed, *alone, strict=True):
        assert (got - (a + b)).norm() <= 1e-5 * (a + b).norm()


def test_no_score_crosses_documents_F06_A03(tiny, tokens) -> None:
    """A0 A1 A2 B0 B1: two scores for A, one for B; the last token of A does not score B0, and entry i scores token
    i + 1 - told apart by logits made by hand."""
    model = tiny()
    a, b = [5, 6, 7], [8, 9]
    got = um.logprobs(model, [a, b, [], [3]])
    assert [len(x) for x in got] == [2, 1, 0, 0]
    changed = um.logprobs(model, [a, [11, 9]])
    assert torch.equal(bits(changed[0]), bits(got[0]))
    row = torch.arange(96.0)
    model.logits = lambda hidden, ctx: row.expand(len(hidden), -1).contiguous()
    made = um.logprobs(model, [a, b])
    norm = row.double().logsumexp(0)
    for lps, sequence in zip(made, (a, b), strict=True):
        want = [row[i].item() - norm.item() for i in sequence[1:]]
        assert lps.tolist() == pytest.approx(want, abs=1e-5)


def test_sharp_head_A05(tiny, tokens) -> None:
    """A head scaled until one token has all the probability: 0 or a finite negative number, and finite gradients."""
    model, ids = tiny(), tokens(30)
    model.head.assign(model.head.master.detach() * 300)
    lps = um.logprobs(model, [ids])[0]
    assert bool(lps.isfinite().all() and (lps <= 0).all())
    assert lps.min() < -200
    lps.sum().backward()
    assert bool(model.head.master.grad.isfinite().all())


class Largest(TorchDispatchMode):
    """The number of float32 values of the largest memory taken while this lasts; views take none."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("rows", [1, 7, 256, 10**6], ids=lambda n: f"rows{n}")
def test_logits_in_chunks_of_rows_F08(tiny, tokens, rows: int) -> None:
    """A vocabulary of 6000, 300 scored tokens: the same bits for any chunk, and no memory larger than a chunk's
    logits, forward and backward."""
    vocabulary = 6000
    model = tiny(vocab_size=vocabulary, num_hidden_layers=1, num_hash_layers=0)
    sequences = [tokens(120, 6), tokens(182, 7)]
    with torch.no_grad():
        want = torch.cat(um.logprobs(model, sequences, rows=300))
    with Largest() as largest:
        got = torch.cat(um.logprobs(model, sequences, rows=rows))
        if rows > 1:  # a forward of one row at a time is slow enough
            got.sum().backward()
    assert torch.equal(bits(got), bits(want))
    whole = 300 * vocabulary
    gathered = 302 * 64 * 80  # a block of rows of each token, as attention reads them
    bound = max(16 * -(-min(rows, 300) // 16) * vocabulary, gathered)
    assert largest.elements <= bound
    assert (bound < whole) == (rows <= 256)


def test_recomputation_with_ties_F09(tiny) -> None:
    """Tokens all alike tie in every choice: with recomputation the same routes, the same bits, forward and backward."""
    model = tiny(num_hash_layers=0)
    sequences = [[7] * 70, [7] * 9]
    want, grads = loss_and_gradients(model, sequences)
    got, again = loss_and_gradients(model, sequences, recompute=True)
    assert torch.equal(bits(got), bits(want))
    unequal = [path for path in grads if not torch.equal(bits(grads[path]), bits(again[path]))]
    assert not unequal
    assert len(grads) > 0


@pytest.mark.parametrize("lengths", [[40, 12], [2]], ids=["many", "one-scored"])
def test_idle_experts_F10(tiny, tokens, lengths: list[int]) -> None:
    """Biases send every token to experts 0 and 1 of 8: the others' gradients are zero, not None."""
    model = tiny(num_hash_layers=0)
    bias = torch.zeros(8)
    bias[:2] = 100.0
    for block in model.blocks:
        block.ffn.bias.assign(bias)
    _, grads = loss_and_gradients(model, [tokens(n, n) for n in lengths], recompute=True)
    for path, g in grads.items():
        if ".experts." in path:
            assert bool((g[2:] == 0).all()), path
            assert bool(g.isfinite().all())


def test_small_steps_add_up_F14() -> None:
    """lr 1e-6 on a weight of 0.02, 100 steps: the float32 master keeps them all. A bf16 master would keep none, and
    the packed bf16 value, whose ulp there is 1.2e-4, moves only once they add up. Each of 100 float32 steps rounds by
    9e-10 at most."""
    weight = Weight(None, 1)
    weight.assign(torch.tensor([0.02]))
    coarse = torch.nn.Parameter(torch.tensor([0.02], dtype=torch.bfloat16))
    first = weight().value.item()
    params = [weight.master, coarse]
    optimizer = torch.optim.SGD(params, lr=1e-6)
    packed = set()
    for _ in range(100):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        weight.commit()
        packed.add(weight().value.item())
    assert weight.master.item() == pytest.approx(0.02 - 1e-4, abs=1e-7)
    assert coarse.item() == torch.tensor(0.02, dtype=torch.bfloat16).item()
    assert 1 <= len(packed) <= 2
    assert weight().value.item() < first


def test_no_step_at_rate_zero_F16(tiny, tokens) -> None:
    """Load, one optimizer step at lr 0: masters and logprobs keep their bits, and the forward is allowed."""
    model, ids = tiny(), tokens(40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model.commit_after(optimizer)
    before = {path: w.master.detach().clone() for path, w in model.weights()}
    lps = um.logprobs(model, [ids])[0]
    lps.sum().backward()
    optimizer.step()
    assert all(torch.equal(w.master, before[path]) for path, w in model.weights())
    assert torch.equal(bits(um.logprobs(model, [ids])[0]), bits(lps))


def test_a_step_moves_the_loss_and_the_old_graph_is_refused(tiny, tokens) -> None:
    model, ids = tiny(), tokens(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.commit_after(optimizer)
    stale = um.logprobs(model, [ids])[0]
    lps = um.logprobs(model, [ids])[0]
    (-lps.mean()).backward()
    optimizer.step()
    assert um.logprobs(model, [ids])[0].mean() > lps.mean()
    with pytest.raises(RuntimeError, match="the master changed"):
        stale.sum().backward()


@pytest.mark.parametrize(
    ("sequences", "options", "told"),
    [
        ([[1, 96]], {}, r"sequence 0, token 1: id 96 is not in \[0, 96\)"),
        ([[1, 2], [-1]], {}, r"sequence 1, token 0: id -1 is not in \[0, 96\)"),
        ([[1, 2]], {"temperature": 0.0}, "temperature of sequence 0 is 0.0"),
        ([[1, 2]], {"temperature": math.nan}, "temperature of sequence 0 is nan"),
        ([[1, 2]], {"temperature": [1.0, 1.0]}, "2 values for 1 sequences"),
        ([[1, 2]], {"rows": 0}, "rows = 0; at least 1"),
    ],
    ids=["high", "low", "zero-T", "nan-T", "counts", "rows"],
)
def test_arguments(tiny, sequences: list, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        um.logprobs(tiny(), sequences, **options)
