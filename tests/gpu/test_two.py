"""Two GPUs over NCCL: the training forward at a model's own widths, in every layout, has the bits of one GPU."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import unified_models as um
from tests.adapters.fsdp.layouts import LAYOUTS, Layout, detached, share, wrapped
from tests.processes import run
from unified_models.adapters.vllm import plugin
from unified_models.arguments import assignments
from unified_models.checkpoint import loading
from unified_models.config import load_json

CONFIGS = Path(__file__).parents[2] / "configs"
CUTS = {
    "nemotron_3_nano_30b": ("hybrid_override_pattern=MEM*E", "num_hidden_layers=5"),
    "deepseek_v4_flash": (
        "num_hidden_layers=3",
        "compress_ratios=[0,4,128]",
        "num_hash_layers=1",
        "expert_dtype=fp8",
        "num_nextn_predict_layers=0",
    ),
}
LENGTHS = (1300, 1, 257, 512, 33, 700)


def sequences() -> list[list[int]]:
    """One pack of LENGTHS."""
    random = Random(0)
    return [[random.randrange(100_000) for _ in range(n)] for n in LENGTHS]


def drawn(folder: Path, ignore_index: bool = False) -> Any:
    """A checkpoint that lies nowhere: the same values in every process."""
    from unified_models.adapters.vllm.random import RandomShards

    return RandomShards(folder, torch.device("cuda"))


def every_layout(folder: Path, layouts: dict[str, Layout]) -> dict[str, list[Tensor]]:
    """The logprobs of this process's sequences in each layout, and of all by a GPU alone."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loading.open_shards = drawn
    found = {}
    with torch.no_grad():
        for name, layout in layouts.items():
            cut = wrapped(folder, layout, device="cuda", packed="resident")
            mine = sequences()[share(layout, rank, size)]
            lps = um.logprobs(cut.model, mine, parallel=cut.parallel)
            found[name] = [lp.cpu() for lp in detached(lps)]
            del cut, lps
            torch.cuda.empty_cache()
        alone = um.load(folder, device="cuda", weights="packed", progress=False)
        found["one GPU"] = [lp.cpu() for lp in um.logprobs(alone, sequences())]
    return found


@pytest.mark.parametrize("name", CUTS)
def test_every_layout_has_the_bits_of_one_gpu(name: str, tmp_path: Path) -> None:
    """Two processes, each with its share of the sequences, the experts or the tokens."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs of one host")
    if plugin.found() is None:
        pytest.skip("vLLM is not installed, whose adapter draws the weights")
    raw = load_json(CONFIGS / f"{name}.json") | dict(assignments(CUTS[name]))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    layouts = LAYOUTS[2]
    answers = run(every_layout, 2, tmp_path / "told", tmp_path, layouts, gpus=True)
    whole = answers[0]["one GPU"]
    assert um.verify.bits(answers[1]["one GPU"], whole).unequal == 0
    for rank, answer in enumerate(answers):
        for layout, how in layouts.items():
            want = whole[share(how, rank, 2)]
            bits = um.verify.bits(answer[layout], want)
            assert (bits.compared, bits.unequal) == (sum(map(len, want)), 0), (rank, layout, bits)
            print(f"{name}, {layout}, process {rank}: {bits}")
    wrong = [lp.clone() for lp in whole]
    wrong[0].view(torch.int32)[7] ^= 1
    assert um.verify.bits(wrong, whole).unequal == 1
