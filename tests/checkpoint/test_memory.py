"""Peak memory of loads, syncs and saves, each measured in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MEASURE = """
import importlib.util, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("toy", sys.argv[1])
toy = importlib.util.module_from_spec(spec)
sys.modules["toy"] = toy
spec.loader.exec_module(toy)
toy.F, toy.M, experts = map(int, sys.argv[4:])
import torch
torch.set_num_threads(1)
from unified_models import checkpoint, registry
registry.find = lambda name: toy
folder = Path(sys.argv[2])
if sys.argv[3] == "write":
    toy.write(folder, toy.tensors("fp8_ue8m0", "mxfp4", count=experts), shards=8, config={"num_experts": experts})
    sys.exit()
small = toy.write(folder / "small", toy.tensors("fp8_ue8m0", "mxfp4", layers=1, count=1),
                  config={"num_experts": 1, "num_layers": 1})
warm = checkpoint.load(small)
list(checkpoint.named_tensors(warm))

def high_water():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

def growth(run):
    "Peak resident memory while `run()` runs, above what was resident before."
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    result = run()
    return high_water() - before, result

load, model = growth(lambda: checkpoint.load(folder, weights=sys.argv[3]))
found = {"load": load, "reported": model.load_report.peak_bytes, "peak": high_water()}
found["model"] = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
found["list"], _ = growth(lambda: [None for _ in checkpoint.named_tensors(model)])
found["save"], _ = growth(lambda: checkpoint.save(model, folder / f"saved-{sys.argv[3]}"))
print(json.dumps(found))
"""
Size = tuple[int, int, int]  # F, M, experts
LARGE: Size = (512, 1024, 24)
MANY: Size = (256, 512, 256)


@pytest.mark.slow(40)
@pytest.mark.parametrize(
    ("size", "weights"), [(LARGE, "master"), (LARGE, "file"), (MANY, "master")], ids=str
)
def test_e08_a37_peak_memory(size: Size, weights: str, tmp_path: Path) -> None:
    """A load needs the model, one shard, one stacked weight's packed bytes and a few matrices of one expert. An export
    or a sync needs a few matrices: of 256 experts, 4 MB (2026-11) where a stack of them has 134 MB."""
    measure(tmp_path, "write", size)
    found = measure(tmp_path, weights, size)
    ffn, width, experts = size
    expert = 4 * ffn * width  # bytes of one expert's matrix in float32
    shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    stack = experts * ffn * width // 2
    print(f"{experts} experts of {expert / 1e6:.1f} MB, {weights}: bytes {found}")
    # Of many small matrices the allocator keeps some that were given back; a stack in float32 would be over this.
    kept = 16 * expert if size == LARGE else 3 * ffn * width * experts
    assert found["load"] < found["model"] + shard + 2 * stack + kept, found
    assert found["reported"] == pytest.approx(found["peak"], rel=0.01), found
    assert found["list"] < 8 * expert, f"views, or one dequantised expert at a time: {found}"
    assert found["save"] < 16 * expert, f"one tensor at a time: {found}"


def measure(folder: Path, weights: str, size: Size) -> dict[str, Any]:
    toy = str(Path(__file__).with_name("toy.py"))
    command = [sys.executable, "-c", MEASURE, toy, str(folder), weights, *map(str, size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {} if weights == "write" else dict(json.loads(done.stdout))
