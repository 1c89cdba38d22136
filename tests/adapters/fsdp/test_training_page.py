"""The example of docs/training.md as it is printed, under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_models as um

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/training.md"
AFTERWARDS = """

def whole(t):
    return None if t is None else getattr(t, "full_tensor", lambda: t)()

weights = [(path, w) for path, w in model.weights() if w.owned.requires_grad]
after = {path: (w.whole().clone(), whole(w.owned.grad)) for path, w in weights}
torch.save(([lp.detach() for lp in lps], after), f"{os.environ['OUT']}/{rank}.pt")
dist.destroy_process_group()
"""


def told(folder: Path, out: Path) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
    """Of each process of the example: logprobs, and masters and gradients after its step."""
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (command,) = re.findall(r"# torchrun (--nproc-per-node 2) train\.py", example)
    (out / "train.py").write_text(example + AFTERWARDS)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *command.split(),
            "--standalone",
            "train.py",
        ],
        cwd=out,
        env=os.environ | {"MODEL": str(folder), "OUT": str(out), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow(15)
def test_the_example_of_the_page(folder: Path, tmp_path: Path) -> None:
    """Logprobs have the bits of one process; gradients are its own but for rounding; masters are what AdamW makes of
    the gradients."""
    answers = told(folder, tmp_path)
    model = um.load(folder, progress=False)
    lps = um.logprobs(model, [[1, 2, 3, 4], [5, 6, 7]])
    for rank, (mine, _) in enumerate(answers):
        bits = um.verify.bits(mine, [lps[rank].detach()])
        assert (bits.compared, bits.unequal) == (3 - rank, 0)
    (-torch.cat(lps).sum() / 5).backward()
    moved = 0
    for path, weight in model.weights():
        if not weight.master.requires_grad:
            continue
        before, alone = weight.master.detach().clone(), weight.master.grad
        master, grad = answers[0][1][path]
        assert torch.equal(master, answers[1][1][path][0]), path
        # Deployed, gradients are rounded to bf16 on their way, each process its own sum.
        assert (grad - alone).abs().max() <= 0.05 * alone.abs().max(), path
        want = before * (1 - 1e-5 * 1e-2) - 1e-5 * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(master, want, rtol=1e-6, atol=1e-8, msg=path)
        moved += int((master != before).sum())
    assert moved > 100_000
