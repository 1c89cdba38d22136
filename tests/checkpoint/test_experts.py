"""Each process loads its own experts: which, under which names, and what it says of the others."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import unified_models as um
from unified_models import checkpoint, verify
from unified_models.checkpoint.match import ELSEWHERE
from unified_models.checkpoint.names import Names
from unified_models.model import LanguageModel

E = 8
CONFIGS = Path(__file__).parents[2] / "configs/tiny"
STATIC = {  # FP8 with one scale for the input of each expert
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"backbone.layers.{layer}.mixer.experts.{e}.{name}_proj": {"quant_algo": "FP8"}
        for layer in (1, 4)
        for e in range(E)
        for name in ("up", "down")
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": (
        "deepseek_v4",
        {"num_hidden_layers": 2, "compress_ratios": [0, 4], "num_hash_layers": 1},
    ),
    "nvfp4": ("nemotron_h", {"config": CONFIGS / "nemotron_h_mixed.json"}),
    "static": ("nemotron_h", {"quantization_config": STATIC}),
}
VALUE = {"gate": 0.5, "up": 1.0, "down": -1.0}


def stacks(model: LanguageModel) -> Iterator[tuple[str, Any]]:
    """("up", its weight) and so on, of every layer."""
    for path, weight in model.weights():
        if ".experts." in path and path.rpartition(".")[2] in VALUE:
            yield path.rpartition(".")[2], weight


def of_expert(name: str) -> int | None:
    """The number of the routed expert in a tensor's name."""
    before, found, after = name.partition(".experts.")
    return int(after.split(".")[0]) if found and not before.endswith("shared") else None


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Expert e holds e + 1 in `up`, the same negative in `down`, half of it in `gate`; so it is, in bf16, whatever the
    format."""
    architecture, options = MODELS[request.param]
    made = tmp_path_factory.mktemp("made") / request.param
    um.make_tiny(architecture, made, seed=5, **options)
    model = um.load(made)
    for name, weight in stacks(model):
        numbers = torch.arange(1.0, E + 1).view(E, 1, 1).expand(weight.shape)
        weight.assign(VALUE[name] * numbers)
    um.save(model, made.with_name("filled"))
    return made.with_name("filled")


def held(folder: Path, size: int) -> list[LanguageModel]:
    return [um.load(folder, experts=(rank, size)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_process_has_its_own_experts_E10_A34(folder: Path, size: int) -> None:
    names = {name for name, _ in um.named_tensors(um.load(folder))}
    for rank, model in enumerate(held(folder, size)):
        mine = range(rank * E // size, (rank + 1) * E // size)
        checked = 0
        for name, weight in stacks(model):
            assert weight.master.shape[0] == len(weight().dequantized()) == len(mine)
            for at, e in enumerate(mine):
                want = torch.full(weight.shape[1:], VALUE[name] * (e + 1))
                for got in (weight.master.detach()[at], weight().dequantized()[at]):
                    assert torch.equal(got.bfloat16().float(), want), (
                        f"{weight.label}: expert {e} on {rank} of {size}"
                    )
                checked += 1
        assert checked >= 4 * len(mine)
        told = {n for n, reason in model.load_report.skipped.items() if reason == ELSEWHERE}
        assert {of_expert(name) for name in told} == set(range(E)) - set(mine)
        away = {name for name in names if of_expert(name) not in (None, *mine)}
        assert told == {name for name in away if not name.endswith(".input_scale")}
        assert (ELSEWHERE in str(model.load_report)) == (size > 1)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_names_are_those_of_all_experts_A34(folder: Path, size: int) -> None:
    """Each tensor comes from every process that has it under its name in the file, with the bits of a whole load."""
    whole = dict(um.named_tensors(um.load(folder)))
    seen: dict[str, int] = dict.fromkeys(whole, 0)
    compared = 0
    for model in held(folder, size):
        for name, tensor in um.named_tensors(model):
            same = verify.bits(tensor, whole[name])
            assert same.unequal == 0, f"{name}: {same}"
            compared, seen[name] = compared + same.compared, seen[name] + 1
    assert all(seen[name] == (size if of_expert(name) is None else 1) for name in whole)
    assert compared > sum(t.numel() for t in whole.values()) / 2 > 0


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        ((2, 2), "experts: process 2 of 2"),
        ((-1, 2), "experts: process -1 of 2"),
        ((0, 0), "experts: process 0 of 0"),
        ((0, 3), "8 experts do not divide over 3 processes"),
        ((0, 16), "8 experts do not divide over 16 processes"),
    ],
    ids=str,
)
def test_a_wrong_rank_or_size_is_refused(folder: Path, experts: tuple[int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        um.load(folder, experts=experts)


def test_an_update_with_all_names_reaches_the_held_experts_A34(folder: Path) -> None:
    """The trainer sends everything; each process takes its own part. What nobody knows is refused as ever."""
    whole = um.load(folder)
    for _, weight in stacks(whole):
        weight.assign(weight.master.detach() * 2)
    sent = [(name, tensor.clone()) for name, tensor in um.named_tensors(whole)]
    for rank, model in enumerate(held(folder, 2)):
        before = checkpoint.sync.digests(model)
        for wrong, told in (
            ([*sent, (unknown(sent), sent[0][1])], "unknown .1.: .*experts.8."),
            (
                [s for s in sent if of_expert(s[0]) != 4 * rank + 1],
                rf"missing .*experts.{4 * rank + 1}\.",
            ),
        ):
            with pytest.raises(ValueError, match=told):
                checkpoint.update(model, wrong)
        assert checkpoint.sync.digests(model) == before
        checkpoint.update(model, sent)
        assert checkpoint.sync.digests(model) != before
        for name, weight in stacks(model):
            got = weight().dequantized()[:, 0, 0].bfloat16().tolist()
            assert got == [2 * VALUE[name] * (e + 1) for e in range(4 * rank, 4 * rank + 4)]


def unknown(sent: list[tuple[str, Tensor]]) -> str:
    """A name like an expert's, with a number that is one too high."""
    return next(n for n, _ in sent if of_expert(n) == E - 1).replace(f".{E - 1}.", f".{E}.")


@pytest.mark.parametrize("size", [2, 4])
def test_what_processes_save_is_the_file_together_E10_A34(
    folder: Path, tmp_path: Path, size: int
) -> None:
    """Bytes of every tensor; one process's part is written when it is asked for by its tensors only, and is refused as
    a whole checkpoint, naming what is missing."""
    want, together = load_file(folder / "model.safetensors"), {}
    for rank, model in enumerate(held(folder, size)):
        part = tmp_path / f"part{rank}"
        first = rank * (E // size)
        which = rf"part{rank}: .* holds experts {first} to {first + E // size - 1} of {E}; .*fsdp\.export"
        with pytest.raises(ValueError, match=which):
            um.save(model, part)
        assert not part.exists()
        um.save(model, part, parts=Names.of(model).parts)
        together |= load_file(part / "model.safetensors")
        away = E - 1 if rank == 0 else 0
        with pytest.raises(ValueError, match=rf"missing [\s\S]*experts\.{away}\."):
            um.load(part)
        again = um.load(part, experts=(rank, size))
        assert checkpoint.sync.digests(again) == checkpoint.sync.digests(model)
    assert set(together) == set(want)
    compared = 0
    for name, tensor in want.items():
        assert together[name].dtype == tensor.dtype, name
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, together[name])]
        assert torch.equal(*raw), name
        compared += len(raw[0])
    assert compared > 10_000
    shutil.rmtree(tmp_path)
