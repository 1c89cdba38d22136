"""Nemotron-H in training: gradients in both numerics, packs, recomputation, and what must stay as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor

import unified_models as um
from unified_models.context.local import LocalContext
from unified_models.context.step import Step

LENGTHS = (1, 0, 129, 3)


def bits(x: Tensor) -> Tensor:
    return x.detach().view(torch.int32)


def trainable(model: Any) -> dict[str, Tensor]:
    return {path: w.master for path, w in model.weights() if not w.frozen}


def distance(got: Tensor, want: Tensor) -> float:
    """Relative to the size of what is wanted, which is not zero."""
    size = want.double().norm()
    assert size > 0, "nothing is tested"
    return float((got.double() - want.double()).norm() / size)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "latent": {"moe_latent_size": 32},
    "chunk128": {"chunk_size": 128},
    "limits": {"time_step_limit": [0.03, 0.1]},
    "dense": {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "n_groups": 1},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_backward_against_float64_D10_D12(hybrid, plain_hybrid, tokens, variant: dict) -> None:
    """Every gradient of the whole model against autograd of plain float64 maths. Tolerance: relative to each tensor's
    norm, float32 through six blocks and back; measured 8e-6 at most (2026-11)."""
    model, ids = hybrid("float32", **variant), tokens(70)
    truth = plain_hybrid(model)
    um.logprobs(model, [ids])[0].square().sum().backward()
    truth.logprobs(ids).square().sum().backward()
    for path, master in trainable(model).items():
        assert distance(master.grad, truth.w[path].grad) < 1e-4, path
    frozen = [w for _, w in model.weights() if w.frozen]
    assert len(frozen) == sum(kind == "moe" for kind in model.config.layers_block_type)
    assert all(w.master.grad is None for w in frozen)


def test_plain_gradient_by_finite_differences(hybrid, plain_hybrid, tokens) -> None:
    """The float64 maths itself: along random directions through all weights, central differences of step 1e-6 lose
    1e-9 to rounding and less to the third derivative."""
    model, ids = hybrid("float32", moe_latent_size=32), tokens(40)
    truth = plain_hybrid(model)
    leaves = [truth.w[path] for path in trainable(model)]
    grads = torch.autograd.grad(truth.logprobs(ids).sum(), leaves)
    masters = [w.detach().clone() for w in leaves]
    for _ in range(3):
        direction = [torch.randn_like(w) for w in leaves]
        slope = sum((g * d).sum() for g, d in zip(grads, direction, strict=True))
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                for w, old, d in zip(leaves, masters, direction, strict=True):
                    w.copy_(old + step * d)
                values.append(truth.logprobs(ids).sum().item())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope.item(), rel=1e-5)


class Run:
    """One deployed forward and backward of a random linear loss: what went in and out of each block, and gradients."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.chosen: dict[str, Tensor] = {}
        self.ins: list[Tensor] = []
        self.outs: list[Tensor] = []
        sites = {module: path for path, module in model.named_modules()}

        def look(site: Any, name: str, value: Any) -> None:
            if name == "choose":
                self.chosen[sites[site]] = value[1]

        def after(module: Any, args: tuple[Tensor, Any], out: Tensor) -> None:
            self.ins.append(args[0])
            self.outs.append(out)

        for block in model.blocks:
            block.register_forward_hook(after)
        ctx = LocalContext(Step.of([len(ids)]), onlooker=look)
        logits = model.logits(model(torch.tensor(ids), ctx), ctx)
        params = trainable(model)
        wanted = [*self.ins, *self.outs, *params.values()]
        grads = torch.autograd.grad((logits * torch.randn_like(logits)).sum(), wanted)
        L = len(self.ins)
        self.to_ins, self.to_outs = grads[:L], grads[L : 2 * L]
        self.to_weights = dict(zip(params, grads[2 * L :], strict=True))

    def block(self, truth: Any, layer: int) -> tuple[float, dict[str, float]]:
        """How far the float64 block is from the deployed one, given the same input and the same gradient of its
        output: its output, and each gradient."""
        truth.chosen = self.chosen
        x = self.ins[layer].detach().double().requires_grad_()
        y = truth.block(layer, x)
        mine = [path for path in self.to_weights if path.startswith(f"blocks.{layer}.")]
        wanted = [x, *(truth.w[path] for path in mine)]
        grads = torch.autograd.grad((y * self.to_outs[layer].double()).sum(), wanted)
        far = {
            path: distance(self.to_weights[path], g)
            for path, g in zip(mine, grads[1:], strict=True)
        }
        far["input"] = distance(self.to_ins[layer], grads[0])
        return distance(self.outs[layer].detach(), y.detach()), far


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "mixed"])
@pytest.mark.parametrize("chunk", [16, 128])
def test_deployed_backward_against_straight_through_float64(
    hybrid, hybrid_file, plain_hybrid, tokens, chunk: int, quantized: bool
) -> None:
    """Block by block, so that no flipped rounding is carried on: FP8 inputs and weights, NVFP4 with and without
    four-over-six, FP8 caches, bf16 in between, each with the gradient of what it replaced.

    Tolerances: an output has equal bits but for a rare flip (1e-3), a scan's also lacks the roundings inside (2e-2);
    gradients are rounded to bf16 where activations are (2e-2; measured 1e-2). The control, masters for quantised
    weights, is off by more than twice that.
    """
    config = hybrid_file.QUANTIZED if quantized else None
    model = hybrid(chunk_size=chunk, moe_latent_size=32, quantization_config=config)
    run = Run(model, tokens(70))
    compared = 0
    for layer, kind in enumerate(model.config.layers_block_type):
        output, far = run.block(plain_hybrid(model, deployed=True), layer)
        assert output < (2e-2 if kind == "mamba" else 1e-3), (layer, output)
        assert max(far.values()) < 2e-2, (layer, far)
        compared += len(far)
        if quantized and kind != "attention":
            _, coarse = run.block(plain_hybrid(model, deployed=True, master=True), layer)
            assert max(coarse.values()) > 4e-2, layer
    assert (
        compared == len(trainable(model)) - 3 + 6
    )  # not the embedding, last norm and head; inputs


def test_the_cache_of_training_is_that_of_the_engine_D18(
    hybrid, hybrid_file, plain_hybrid, tokens
) -> None:
    """FP8 keys and values with their scales are in the training forward; without them the block is another."""
    model = hybrid(quantization_config=hybrid_file.QUANTIZED)
    run, truth = Run(model, tokens(70)), plain_hybrid(model, deployed=True)
    with torch.no_grad():
        want = run.outs[2].double()
        assert distance(truth.block(2, run.ins[2].double()), want) < 1e-3
        for scale in ("k_scale", "v_scale"):
            other = plain_hybrid(model, deployed=True)
            del other.values[f"blocks.2.mixer.{scale}"]
            assert distance(other.block(2, run.ins[2].double()), want) > 2e-3, scale


def test_frozen_tensors_have_no_gradient(hybrid, hybrid_file, tokens) -> None:
    """The router's bias, scales of caches and of inputs; everything else has one, finite and not all zero."""
    model = hybrid(quantization_config=hybrid_file.QUANTIZED)
    torch.cat(um.logprobs(model, [tokens(60, 1), tokens(33, 2)])).sum().backward()
    frozen = {path for path, w in model.weights() if w.frozen}
    kinds = {path.split(".")[-1] for path in frozen}
    assert kinds == {"bias", "k_scale", "v_scale", "input_scale"}
    for path, weight in model.weights():
        assert weight.master.requires_grad == (path not in frozen)
        if path in frozen:
            assert weight.master.grad is None, path
        else:
            assert bool(weight.master.grad.isfinite().all()), path
            assert bool((weight.master.grad != 0).any()), path


def pack(tokens: Any, *seeds: int) -> list[list[int]]:
    return [tokens(n, seed) for n, seed in zip(LENGTHS, seeds or range(4), strict=True)]


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "mixed"])
@pytest.mark.parametrize("chunk", [16, 128])
def test_packs_have_the_bits_of_each_alone_F01_F05(
    hybrid, hybrid_file, tokens, chunk: int, quantized: bool
) -> None:
    """Documents of 1, 0, 129 and 3 tokens, in this order and reversed."""
    config = hybrid_file.QUANTIZED if quantized else None
    model, documents = hybrid(chunk_size=chunk, quantization_config=config), pack(tokens)
    with torch.no_grad():
        alone = [um.logprobs(model, [d])[0] for d in documents]
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 1, 0]):
            packed = um.logprobs(model, [documents[i] for i in order])
            compared = 0
            for i, got in zip(order, packed, strict=True):
                assert torch.equal(bits(got), bits(alone[i])), f"document {i} of {order}"
                compared += len(got)
            assert compared == 128 + 2


@pytest.mark.parametrize("chunk", [16, 128])
def test_packed_gradients_are_the_sum_F01(hybrid, tokens, chunk: int) -> None:
    """Float32 sums in another order: 1e-5 of their size."""
    model, documents = hybrid("float32", chunk_size=chunk), pack(tokens)
    params = list(trainable(model).values())
    loss = torch.cat(um.logprobs(model, documents)).sum()
    packed = torch.autograd.grad(loss, params)
    alone = [
        torch.autograd.grad(um.logprobs(model, [d])[0].sum(), params)
        for d in documents
        if len(d) > 1
    ]
    assert len(alone) == 2
    for path, got, a, b in zip(trainable(model), packed, *alone, strict=True):
        assert distance(got, a + b) < 1e-5, path


def test_a_document_does_not_reach_another_F01_F03(hybrid, tokens) -> None:
    """Another second or third document, of the same length or not: no bit of the last one moves, nor of its gradient's
    values beyond float32 sums. The last taps and the last state before it are the neighbour's: local positions start
    at 0, so it must read zeros instead."""
    model, documents = hybrid(), pack(tokens)
    params = list(trainable(model).values())
    others = [pack(tokens, 0, 1, 7, 3), [documents[0], [5] * 4, documents[2][:40], documents[3]]]
    want = um.logprobs(model, documents)[3]
    grads = torch.autograd.grad(want.sum(), params)
    for other in others:
        got = um.logprobs(model, other)
        assert torch.equal(bits(got[3]), bits(want)) and len(want) == 2
        assert not torch.equal(got[2], um.logprobs(model, documents)[2])
        again = torch.autograd.grad(got[3].sum(), params)
        for path, a, b in zip(trainable(model), again, grads, strict=True):
            assert distance(a, b) < 1e-5, path


def test_empty_packs_F02(hybrid, tokens) -> None:
    model = hybrid()
    for lengths in ((0, 0, 0), (0,), (0, 5), (5, 0), (1, 1)):
        documents = [tokens(n, n) for n in lengths]
        got = um.logprobs(model, documents)
        assert [len(lps) for lps in got] == [max(n - 1, 0) for n in lengths]
        for lps, document in zip(got, documents, strict=True):
            assert torch.equal(bits(lps), bits(um.logprobs(model, [document])[0]))


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "mixed"])
def test_recomputation_changes_nothing_F09(hybrid, hybrid_file, quantized: bool) -> None:
    """Tokens all alike tie in every choice: with recomputation the same routes, the same bits, forward and backward."""
    model = hybrid(quantization_config=hybrid_file.QUANTIZED if quantized else None)
    results = []
    for recompute in (False, True):
        lps = torch.cat(um.logprobs(model, [[7] * 70, [7] * 9], recompute=recompute))
        grads = torch.autograd.grad(lps.square().sum(), list(trainable(model).values()))
        results.append([lps.detach(), *grads])
    assert len(results[0]) == len(trainable(model)) + 1
    for path, a, b in zip(["logprobs", *trainable(model)], *results, strict=True):
        assert torch.equal(bits(a), bits(b)), path


def test_idle_experts_have_gradients_of_zero_F10(hybrid, tokens) -> None:
    """Biases send every token to experts 0, 1 and 2 of 8."""
    model = hybrid()
    bias = torch.zeros(8)
    bias[:3] = 100.0
    for layer in (1, 5):
        model.blocks[layer].mixer.bias.assign(bias)
    um.logprobs(model, [tokens(40)])[0].sum().backward()
    checked = 0
    for path, master in trainable(model).items():
        if ".experts." in path:
            assert bool((master.grad[3:] == 0).all()), path
            assert bool((master.grad[:3] != 0).flatten(1).any(1).all()), path
            checked += 1
    assert checked == 4


def test_a_step_moves_the_loss_and_the_old_graph_is_refused(hybrid, hybrid_file, tokens) -> None:
    model, ids = hybrid(quantization_config=hybrid_file.QUANTIZED), tokens(40)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.commit_after(optimizer)
    scales = {p: w.master.clone() for p, w in model.weights() if w.frozen}
    stale = um.logprobs(model, [ids])[0]
    lps = um.logprobs(model, [ids])[0]
    (-lps.mean()).backward()
    optimizer.step()
    assert um.logprobs(model, [ids])[0].mean() > lps.mean()
    assert all(torch.equal(w.master, scales[p]) for p, w in model.weights() if w.frozen)
    with pytest.raises(RuntimeError, match="the master changed"):
        stale.sum().backward()
