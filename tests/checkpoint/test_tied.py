"""Qwen3's tied head: one tensor of the model, whatever a file or a trainer calls it. A30."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import unified_models as um
from unified_models.checkpoint.sync import update

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    um.make_tiny("qwen3", tmp_path / "tied", tie_word_embeddings=True)
    return tmp_path / "tied"


def with_head(folder: Path, change: float) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    head = tensors[EMBED].clone()
    head[3, 5] += change
    save_file(tensors | {HEAD: head}, file, {"format": "pt"})


def test_a_file_with_both_names_loads_where_they_are_equal_A30(folder: Path) -> None:
    alone = um.load(folder, progress=False)
    with_head(folder, 0.0)
    both = um.load(folder, progress=False)
    assert both.load_report.skipped == {HEAD: f"the same tensor as {EMBED}"}
    (a,), (b,) = (um.logprobs(model, [[1, 2, 3]]) for model in (alone, both))
    assert um.verify.bits(a, b).unequal == 0 and um.verify.bits(a, b).compared == 2


def test_a_file_whose_head_differs_is_refused_A30(folder: Path) -> None:
    with_head(folder, 1.0)
    with pytest.raises(ValueError, match=f"{HEAD} and {EMBED} must be one tensor"):
        um.load(folder, progress=False)


def test_a_head_without_tying_is_a_tensor_of_its_own_A30(tmp_path: Path) -> None:
    um.make_tiny("qwen3", tmp_path / "untied")
    with_head(tmp_path / "untied", 1.0)
    assert not um.load(tmp_path / "untied", progress=False).load_report.skipped


def test_updates_name_it_beside_the_embedding_or_not_at_all_A30(folder: Path) -> None:
    model = um.load(folder, progress=False)
    named = {name: t.detach().clone() for name, t in um.named_tensors(model)}
    assert HEAD not in named
    named[EMBED] += 0.5
    update(model, (named | {HEAD: named[EMBED]}).items())
    assert torch.equal(model.embed.master, named[EMBED])
    with pytest.raises(ValueError, match=f"{HEAD} and {EMBED} are one tensor of the model"):
        update(model, (named | {HEAD: named[EMBED] + 1}).items())
    with pytest.raises(ValueError, match=f"{HEAD} is given without {EMBED}"):
        update(model, {HEAD: named[EMBED]}.items(), strict=False)
    assert torch.equal(model.embed.master, named[EMBED])
