"""Memory of what leaves cut models: one tensor at a time, though 256 experts lie on two processes."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import unified_models as um
from tests.memory import Peak
from tests.processes import run
from unified_models.adapters import fsdp
from unified_models.context.parallel import Parallel

EXPERTS, WIDTH, FFN = 256, 128, 64
MATRIX = 4 * WIDTH * FFN


@pytest.mark.slow(40)
def test_export_of_256_experts_A37(tmp_path: Path) -> None:
    """What exporting and listing hold at once, beside the model: a few matrices, never a stack of them."""
    um.make_tiny(
        "deepseek_v4",
        tmp_path / "tiny",
        hidden_size=WIDTH,
        moe_intermediate_size=FFN,
        n_routed_experts=EXPERTS,
        num_hidden_layers=1,
        num_hash_layers=0,
        compress_ratios=(0,),
    )
    for listed, exported, largest in run(exporting, 2, tmp_path / "run", tmp_path / "tiny"):
        assert MATRIX < largest < EXPERTS // 2 * MATRIX / 4, "no stack of a process is as small"
        assert 0 < listed < 4 * largest
        assert 0 < exported < 8 * largest
    want, got = (
        dict(um.named_tensors(um.load(tmp_path / name, progress=False))) for name in ("tiny", "out")
    )
    assert want.keys() == got.keys()
    told = um.verify.bits([got[name].float() for name in want], [t.float() for t in want.values()])
    assert told.unequal == 0 and told.compared > 3 * EXPERTS * WIDTH * FFN
    expert = next(name for name in want if ".experts." in name)
    got[expert].view(torch.int32)[0, 0] ^= 1  # the control
    assert um.verify.bits([got[expert]], [want[expert]]).unequal == 1


def exporting(folder: Path) -> tuple[int, int, int]:
    """Bytes at once of a list and of an export, and of the largest tensor, in float32."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = um.load(folder, experts=(rank, size), progress=False)
    fsdp.wrap(model, init_device_mesh("cpu", (size,)))
    parallel = Parallel(experts=dist.group.WORLD)
    largest = 0
    with Peak() as listed:
        for _, tensor in fsdp.named_tensors(model, parallel):
            largest = max(largest, tensor.numel() * 4)
    with Peak() as exported:
        fsdp.export(model, folder.parent / "out", parallel)
    return listed.peak, exported.peak, largest
