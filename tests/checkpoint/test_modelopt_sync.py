"""ModelOpt's formats from process to process: input scales in the sync list, masters, reloads, experts, training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import unified_models as um
from unified_models import checkpoint
from unified_models.checkpoint.names import Names

FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
NVFP4 = {"quant_algo": "NVFP4", "ignore": ["lm_head"]}
FOUR_OVER_SIX = {"quant_algo": "W4A16_NVFP4", "four_over_six": True}
IDS = [[5, 511, 0, 77, 3, 3, 260, 19, 44, 501, 7, 7, 130, 12, 99, 4, 311, 257, 2, 1]]


def test_input_scales_are_part_of_the_list(nemotrons: Any, toy_file: Any) -> None:
    """One for each FP8 matrix, experts too, float32; an engine that gets them computes what the sender does."""
    one, two = um.load(nemotrons(FP8)), um.load(nemotrons(FP8, 1))
    listed = dict(um.named_tensors(one))
    names = [name for name in listed if name.endswith(".input_scale")]
    weights = [weight for _, weight in one.weights() if weight.format.name == "fp8_tensor"]
    matrices = sum(len(w.shape) < 3 or w.shape[0] for w in weights)
    assert len(names) == matrices == 2 * 2 + 2 * 18 + 2 * 4 + 1
    file = load_file(nemotrons(FP8) / "model.safetensors")
    assert all(torch.equal(listed[name], file[name]) for name in names)
    assert all(listed[name].dtype == torch.float32 and not listed[name].ndim for name in names)
    assert len({listed[name].item() for name in names}) == len(names)
    expected = um.logprobs(one, IDS)[0]
    assert not torch.equal(um.logprobs(two, IDS)[0], expected)
    rest = [(name, tensor) for name, tensor in listed.items() if name not in names]
    checkpoint.update(two, rest, strict=False)
    assert not torch.equal(um.logprobs(two, IDS)[0], expected), "the control: without them"
    checkpoint.update(two, listed.items())
    assert torch.equal(um.logprobs(two, IDS)[0], expected)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (torch.tensor(0.0), r"is 0\.0, expected a finite number above 0"),
        (torch.tensor(float("nan")), r"is nan, expected a finite number above 0"),
        (torch.tensor(0.1).bfloat16(), r"is torch\.bfloat16, expected float32"),
        (torch.tensor([0.1, 0.1]), r"is \(2,\), expected \(\)"),
        (None, r"missing \(1\): "),
    ],
    ids=["zero", "nan", "bfloat16", "two", "missing"],
)
@pytest.mark.parametrize("expert", [False, True], ids=["matrix", "expert"])
def test_an_update_checks_input_scales(
    nemotrons: Any, values: Tensor | None, told: str, expert: bool
) -> None:
    model = um.load(nemotrons(FP8))
    at = "layers.4.mixer.experts.3.up_proj" if expert else "layers.2.mixer.in_proj"
    name = f"backbone.{at}.input_scale"
    sent = {n: t + 1 for n, t in um.named_tensors(model)}
    assert name in sent
    if values is None:
        del sent[name]
    else:
        sent[name] = values
    before = {n: t.clone() for n, t in um.named_tensors(model)}
    with pytest.raises(ValueError, match=rf"the update was not applied\n.*{told}") as error:
        checkpoint.update(model, sent.items())
    assert name in str(error.value)
    assert all(torch.equal(before[n], t) for n, t in um.named_tensors(model))


@pytest.mark.parametrize("said", ["mixed", FP8, FOUR_OVER_SIX], ids=str)
def test_masters_keep_formats_and_input_scales(
    nemotrons: Any, same: Any, tmp_path: Path, said: Any
) -> None:
    model = um.load(nemotrons(said))
    for _, weight in model.weights():
        if not weight.positive:
            weight.assign(weight.master + torch.randn(weight.shape) / 100)
    um.save(model, tmp_path / "one", masters=True, max_shard_bytes=300_000)
    again = um.load(tmp_path / "one")
    for (path, a), (_, b) in zip(model.weights(), again.weights(), strict=True):
        assert same(a.master, b.master) and a.format is b.format, path
        assert all(same(a().packed[key], b().packed[key]) for key in a.packed_names), path
    assert again.load_report.changed == ()
    state: dict[str, Tensor] = {}
    for path in (tmp_path / "one").glob("*.safetensors"):
        state |= load_file(path)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert any(n.endswith("input_scale") for n in state) == (said != FOUR_OVER_SIX)


@pytest.mark.parametrize("said", ["mixed", FP8, FOUR_OVER_SIX, None], ids=str)
@pytest.mark.parametrize("weights", ["master", "file"])
def test_a_reload_in_place_leaves_nothing_unwritten_A33(
    nemotrons: Any, same: Any, pointers: Any, poisoned: None, said: Any, weights: str
) -> None:
    """Experts of one projection into them: every name of the list fits, every byte is written, no storage moves."""
    new, old = um.load(nemotrons(said, 1)), um.load(nemotrons(said), weights=weights)
    where = pointers(old)
    sent = dict(um.named_tensors(new))
    assert not any("gate_proj" in name for name in sent)
    checkpoint.update(old, sent.items())
    assert pointers(old) == where
    compared = 0
    for (path, a), (_, b) in zip(new.weights(), old.weights(), strict=True):
        assert all(same(a().packed[key], b().packed[key]) for key in a.packed_names), path
        assert b().value.isfinite().all(), path
        compared += len(a.packed_names)
    assert compared > 40


@pytest.mark.parametrize("said", ["mixed", FP8, FOUR_OVER_SIX, None], ids=str)
def test_experts_keep_their_place_A34(nemotrons: Any, tmp_path: Path, said: Any) -> None:
    """Expert e filled with e + 1, up positive and down negative: there after an update, a save and a load."""
    model = um.load(nemotrons(said))
    sent = []
    for name, values in um.named_tensors(model):
        if ".experts." in name and name.endswith(".weight"):
            e, word = int(name.split(".")[5]), name.split(".")[6]
            values = torch.full_like(values, (e + 1) * (1 if word == "up_proj" else -1))
        sent.append((name, values))
    checkpoint.update(model, reversed(sent))
    um.save(model, tmp_path / "saved", max_shard_bytes=50_000)
    for found in (model, um.load(tmp_path / "saved"), um.load(tmp_path / "saved", weights="file")):
        for e in range(8):
            for word, sign in (("up", 1), ("down", -1)):
                values = getattr(found.blocks[1].mixer.experts, word)().value[e]
                largest = (values - sign * (e + 1)).abs().max().item()
                assert largest < (e + 1) * 2**-20, "one float32 rounding of code * scale"


def numbered(model: Any) -> dict[str, Tensor]:
    return {
        f"{path} {key}": weight().packed[key].clone()
        for path, weight in model.weights()
        for key in weight.packed_names
    }


@pytest.mark.parametrize("said", ["mixed", FP8, NVFP4, FOUR_OVER_SIX], ids=str)
def test_training_packs_what_is_deployed_D24(
    nemotrons: Any, same: Any, tmp_path: Path, said: Any
) -> None:
    """After each step the forward's bytes are pack(master), the same whenever they are packed; a save and a load
    give a server the same logprobs. Every master has a name in the checkpoint, and frozen scales do not move."""
    model = um.load(nemotrons(said))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=2e-3, weight_decay=0.0
    )
    model.commit_after(optimizer)
    frozen = {p: w.master.clone() for p, w in model.weights() if w.frozen}
    seen = [numbered(model)]
    for _ in range(2):
        optimizer.zero_grad()
        (-um.logprobs(model, IDS)[0].mean()).backward()
        optimizer.step()
        seen.append(numbered(model))
        compared = 0
        for path, weight in model.weights():
            packed = weight.format.pack(weight.master.detach().clone())
            assert all(same(weight().packed[key], packed[key]) for key in packed), path
            again = weight.format.unpack(packed, weight.shape).view(weight.shape)
            assert same(weight().value.detach(), again), path
            compared += len(packed)
            weight.commit()
        assert compared == len(seen[0])
        assert all(same(seen[-1][key], values) for key, values in numbered(model).items())
    for path, weight in model.weights():
        moved = [
            not same(seen[0][f"{path} {key}"], seen[2][f"{path} {key}"]) for key in weight().packed
        ]
        assert any(moved) != weight.frozen, path
        assert path not in frozen or same(frozen[path], weight.master)
    named = {id(part.owner.master) for part in Names.of(model).parts}
    assert named == {id(parameter) for parameter in model.parameters()}
    um.save(model, tmp_path / "saved")
    served = um.load(tmp_path / "saved", weights="file")
    assert same(um.logprobs(served, IDS)[0], um.logprobs(model, IDS)[0].detach())


def test_digests_tell_what_a_forward_reads(nemotrons: Any) -> None:
    """Equal after an update by the same masters; one bit of a packed byte, or of an input scale, is seen."""
    trainer, server = um.load(nemotrons()), um.load(nemotrons(), weights="packed")
    with torch.no_grad():
        for _, weight in trainer.weights():
            if not weight.frozen:
                weight.master.mul_(1.01)
    trainer.commit()
    assert checkpoint.digests(trainer) != checkpoint.digests(server)
    checkpoint.update(server, um.named_tensors(trainer))
    told = checkpoint.digests(server)
    assert told == checkpoint.digests(trainer) and len(told) > 60
    weights = dict(server.weights())
    for path, piece in (
        ("blocks.1.mixer.experts.up", "codes"),
        ("blocks.0.mixer.in_proj", "scale"),
        ("blocks.0.mixer.in_proj.input_scale", "values"),
        ("blocks.0.mixer.A_log", "values"),
    ):
        getattr(weights[path], piece).view(-1).view(torch.uint8)[0] ^= 1
        changed = checkpoint.digests(server)
        assert [name for name in told if told[name] != changed[name]] == [f"{path}.{piece}"]
        told = changed
