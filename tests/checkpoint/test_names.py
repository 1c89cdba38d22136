"""Two-way name tables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unified_models import checkpoint
from unified_models.checkpoint.names import Names, Pattern
from unified_models.model import LanguageModel
from unified_models.weight import Table, Weight


class Small(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Weight("vocab", 3, None, 4)
        self.blocks = nn.ModuleList(
            [nn.ModuleDict({"a": Weight(None, 2, None, 4), "t": Table("v", 3)})]
        )
        self.stack = Weight("experts", 2, None, 5, None, 4)


ROWS: dict[str, str | tuple[str, ...]] = {
    "embed": ("embed.weight", "tok.weight"),
    "blocks.{l}.{w:a=x|t=y}": "layers.{l}.{w}",
    "stack": "experts.{e}.weight",
}


def names(rows: dict[str, str | tuple[str, ...]], skipped: dict[str, str] | None = None) -> Names:
    return Names(Small(), rows, skipped or {})


def test_every_part_has_its_names_in_module_order() -> None:
    parts = names(ROWS).parts
    assert [(p.path, p.name, p.index, tuple(p.shape)) for p in parts] == [
        ("embed", "embed.weight", None, (3, 4)),
        ("blocks.0.a", "layers.0.x", None, (2, 4)),
        ("blocks.0.t", "layers.0.y", None, (3,)),
        ("stack", "experts.0.weight", 0, (5, 4)),
        ("stack", "experts.1.weight", 1, (5, 4)),
    ]


def test_every_spelling_finds_its_part() -> None:
    table = names(ROWS)
    for name in ("embed.weight", "tok.weight", "model.embed.weight", "model.tok.weight"):
        assert table.by_name[name].path == "embed"
    assert table.by_name["model.experts.1.weight"].index == 1


def test_numbers_match_numbers_only() -> None:
    pattern = Pattern("blocks.{l}.a", "layers.{l}.a")
    assert pattern.regex.fullmatch("blocks.12.a")
    assert not pattern.regex.fullmatch("blocks.x.a")
    assert not pattern.regex.fullmatch("blocks.1.2.a")
    assert not pattern.regex.fullmatch("blocksx1.a"), "a dot is a dot"


def without(path: str) -> dict[str, str | tuple[str, ...]]:
    return {key: value for key, value in ROWS.items() if key != path}


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (without("embed"), "embed: no pattern"),
        (ROWS | {"emb{w:ed|x}": "y.{w}"}, "embed: .* all name it"),
        (ROWS | {"stack": "embed.weight"}, "embed.weight is embed and stack"),
        (ROWS | {"embed": ("a", "a")}, "a is embed"),
        (ROWS | {"stack": "e.{e}.{f}"}, "on the right only"),
        (ROWS | {"stack": ("e.{e}", "f")}, "no {e} in 'f'"),
        (ROWS | {"blocks.{l}.{w:a|t}": "layers.{l}.{w}.{e}"}, "all name it"),
        (without("blocks.{l}.{w:a=x|t=y}") | {"blocks.{l}.{l:a|t}": "x.{l}"}, "{l} twice"),
        (
            without("blocks.{l}.{w:a=x|t=y}") | {"blocks.0.{w:a|t}": "x.{w}.{e}"},
            "nothing is stacked",
        ),
    ],
)
def test_bad_tables_are_assertions(rows: dict[str, Any], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        _ = names(rows).parts


def test_rules_match_whole_names_with_and_without_prefix() -> None:
    table = names(ROWS, {r"mtp\..*": "a draft head"})
    assert table.reason("mtp.0.x") == table.reason("model.mtp.0.x") == "a draft head"
    assert table.reason("layers.0.mtp.x") is None
    assert table.reason("mtpx") is None


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("hyper", ["hc_fn", "hc.fn"], ids=["underscored", "dotted"])
def test_c06_e09_every_spelling_loads(
    toy: Any, tmp_path: Path, same: Callable[..., bool], prefix: str, hyper: str
) -> None:
    state = toy.tensors("fp8_ue8m0", "mxfp4")
    spelled = {
        prefix + name.replace("hc_fn", hyper).replace("embed.", "embed_tokens."): tensor
        for name, tensor in state.items()
    }
    assert set(spelled) != set(state)
    model = checkpoint.load(toy.write(tmp_path / "a", spelled))
    other = checkpoint.load(toy.write(tmp_path / "b", state))
    for (name, a), (also, b) in zip(
        checkpoint.named_tensors(model), checkpoint.named_tensors(other), strict=True
    ):
        assert name == also and same(a, b)


def test_e09_scales_as_transformers_spells_them(
    toy: Any, loaded: Any, same: Callable[..., bool]
) -> None:
    state = toy.tensors("fp8_ue8m0")
    spelled = {name.replace(".scale", ".weight_scale_inv"): t for name, t in state.items()}
    assert set(spelled) != set(state)
    a, b = (loaded(s).blocks[0].proj() for s in (state, spelled))
    assert same(a.packed["codes"], b.packed["codes"]) and same(
        a.packed["scales"], b.packed["scales"]
    )


def test_two_spellings_of_one_tensor_stop(toy: Any, loaded: Any) -> None:
    state = toy.tensors()
    state["model.head.weight"] = torch.zeros_like(state["head.weight"])
    with pytest.raises(ValueError, match=r"head.weight and model.head.weight are the same tensor"):
        loaded(state)
