"""Small checkpoints, and a toy whose logits are written by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unified_models as um
from unified_models.context import Weight
from unified_models.context.local import LocalContext
from unified_models.context.memory import PackMemory
from unified_models.model import LanguageModel
from unified_models.ops.operator import operator
from unified_models.verify.trace import one_ulp

MICRO: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "index_head_dim": 16,
    "sliding_window": 8,
    "quantization_config": None,
    "expert_dtype": None,
}
"""DeepSeek-V4 with every part, for float32 only: its widths are no multiples of the quantised blocks."""


@pytest.fixture(scope="session")
def micro_sizes() -> dict[str, Any]:
    return MICRO


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "deepseek_v4"
    um.make_tiny("deepseek_v4", folder)
    return folder


@pytest.fixture(scope="session")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("micro") / "deepseek_v4"
    um.make_tiny(
        "deepseek_v4",
        folder,
        compress_ratios=[0, 4, 8],
        num_hidden_layers=3,
        num_hash_layers=1,
        **MICRO,
    )
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LanguageModel:
    return um.load(tiny_folder)


@pytest.fixture(scope="session")
def micro(micro_folder: Path) -> LanguageModel:
    return um.load(micro_folder, numerics="float32")


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nemotron-H with every kind of layer and chunks of 16 tokens."""
    folder = tmp_path_factory.mktemp("hybrid") / "nemotron_h"
    um.make_tiny("nemotron_h", folder)
    return folder


@pytest.fixture(scope="session")
def hybrid(hybrid_folder: Path) -> LanguageModel:
    return um.load(hybrid_folder)


@pytest.fixture
def draw() -> Any:
    """draw(3, 5): random token ids, a list of each length."""
    random = Random(0)
    return lambda *lengths: [[random.randrange(512) for _ in range(n)] for n in lengths]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """faulty("moe", 7): that operator gives token 7 other bits, by one unit in the last place, in a step of several
    sequences, and wherever there is a memory. A sequence alone in the training forward keeps its bits."""

    def make(name: str, token: int) -> None:
        honest = getattr(LocalContext, name)

        def wrong(self: LocalContext, *args: Any, **options: Any) -> Any:
            out = honest(self, *args, **options)
            alone = len(self.step.lengths) == 1 and isinstance(self.memory, PackMemory)
            rows = (self.positions_T == token) & (not alone)
            if rows.any():
                out = out.clone()
                out[rows] = one_ulp(out[rows])
            return out

        wrong.__name__ = name  # under which it is seen
        monkeypatch.setattr(LocalContext, name, operator(wrong))

    return make


@dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = 16
    max_position_embeddings: int = 64


class Toy(LanguageModel):
    """The row of a token holds the logits that `table` has for it: row i of the table says what follows token i."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ToyConfig()
        self.table = Weight(None, 16, None, 16, format="float32")
        self.blocks = nn.ModuleList()
        self.name_parts()
        self.table.assign(torch.arange(256.0).view(16, 16) * 37 % 101 / 16)

    def forward(self, ids_T: Tensor, ctx: Any) -> Tensor:
        return self.table().value[ids_T]

    def logits(self, hidden_TM: Tensor, ctx: Any) -> Tensor:
        return hidden_TM


@pytest.fixture
def toy() -> Toy:
    return Toy()
