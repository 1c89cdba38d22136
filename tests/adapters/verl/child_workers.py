"""As child.py, through what verl puts around an engine: `python child_workers.py worker | processes FOLDER`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import child
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

import unified_models as um
from unified_models.adapters.verl import UnifiedEngineConfig
from unified_models.checkpoint import update


def start(rank: int, processes: int, folder: Path) -> None:
    """Processes that find each other through a file."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{processes}", rank=rank, world_size=processes
    )


def worker(folder: Path) -> Any:
    """verl's TrainingWorker: inference, then two mini-batches; a fault in the second; a checkpoint; the weights."""
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(folder), load_tokenizer=False),
            engine_config=UnifiedEngineConfig(
                use_dynamic_bsz=True,
                max_token_len_per_gpu=40,
                infer_max_token_len_per_gpu=30,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3),
            checkpoint_config=CheckpointConfig(),
        )
    )
    made.reset()
    made.set_loss_fn(child.LOSS)
    data = child.batch(child.rollout(um.load(folder)))
    for key in ("use_dynamic_bsz", "micro_batch_size_per_gpu"):
        tu.pop(data, key)
    tu.assign_non_tensor(data, compute_loss=False)
    told = made.infer_batch(data.copy())
    old = child.no_padding_2_padding(told["log_probs"], data)
    more = {"mini_batch_size": 2, "epochs": 1}
    asked = child.for_update(data, old, **more)
    before = child.masters(made.engine)
    found: dict[str, Any] = {
        "fault": child.told_by(lambda: made.train_mini_batch(child.flipped(asked, 1, 0).copy()))
    }
    found["after_fault"] = child.unequal(before, child.masters(made.engine))
    metrics = tu.get(made.train_mini_batch(asked.copy()), "metrics")
    found["metrics"] = {
        key: [float(v) for v in (value if isinstance(value, list) else [value])]
        for key, value in metrics.items()
    }
    found["after"] = child.unequal(before, child.masters(made.engine))
    made.save_checkpoint(f"{folder}-worker/actor", None, 1, None)
    kept = child.masters(made.engine)
    made.reset()
    found["reset"] = child.unequal(before, child.masters(made.engine))
    made.load_checkpoint(f"{folder}-worker/actor")
    found["loaded"] = child.unequal(kept, child.masters(made.engine))
    return found


def processes(folder: Path) -> Any:
    """Two processes with half of the sequences each; afterwards this one with all of them."""
    told = Path(f"{folder}-processes")
    told.mkdir()
    # Forked before anything ran here: verl takes long to import.
    mp.start_processes(_of_several, (2, folder, told), 2, start_method="fork")
    _of_several(0, 1, folder, told)
    one, *two = (torch.load(told / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    whole = {name: torch.cat([part[name] for part in two]) for name in ("log_probs", "entropy")}
    return {
        "outputs": child.unequal({n: one[n] for n in whole}, whole),
        "norms": [part["norm"] for part in (one, *two)],
        "bits": [part["bits"] for part in (one, *two)],
        "faults": [part["fault"] for part in two],
        "resumed": [part["resumed"] for part in two],
        "sent": child.unequal(two[0]["sent"], two[1]["sent"]),
        "served": child.unequal(two[0]["served"], two[0]["after"]),
    }


def _of_several(rank: int, count: int, folder: Path, told: Path) -> None:
    torch.set_num_threads(1)
    start(rank, count, told)
    made = child.engine(folder)
    outs = child.rollout(um.load(folder))
    data = child.batch(outs)
    data = tu.chunk_tensordict(data, count)[rank]
    found: dict[str, Any] = dict(child.infer(made, data))
    asked = child.for_update(data, found["log_probs"], global_batch_size=len(outs))
    bad = child.flipped(asked, 0, 0) if rank == count - 1 else asked
    found["fault"] = child.told_by(lambda: child.train(made, bad))
    metrics = child.plain(child.train(made, asked)["metrics"])
    found["norm"] = metrics["grad_norm"]
    found["bits"] = [metrics["bits/compared"], metrics["bits/unequal"]]
    found["sent"] = {n: t.clone() for n, t in made.get_per_tensor_param()[0]}
    made.save_checkpoint(str(told / f"saved-{count}"))
    made.check.mode = "off"
    found["after"] = child.infer(made, data)
    other = child.engine(folder, check="off")
    other.load_checkpoint(str(told / f"saved-{count}"))
    again = child.infer(other, data)
    steps = [child.train(e, asked) for e in (made, other)]
    local = [
        {n: t.to_local() if hasattr(t, "to_local") else t for n, t in child.masters(e).items()}
        for e in (made, other)
    ]
    found["resumed"] = [
        child.unequal(found["after"], again),
        child.unequal(*local),
        [step["metrics"]["grad_norm"] for step in steps],
    ]
    model = um.load(folder)
    update(model, found["sent"].items())
    found["served"] = served(model, outs, found["after"], data)
    torch.save(found, told / f"{count}-{rank}.pt")
    dist.destroy_process_group()


def served(model: Any, outs: Any, like: dict[str, Tensor], data: Any) -> dict[str, Tensor]:
    """The same outputs by a model that was given the weights that were sent, in one process."""
    from unified_models.adapters.verl.batch import outputs

    with torch.no_grad():
        told = outputs(model, data, recompute=False, rows=7, provider="torch_row")
    return {n: child.no_padding_2_padding(told[n], data) for n in like}


JOBS = {job.__name__: job for job in (worker, processes)}

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "worker":
        start(0, 1, folder)
    print(json.dumps(JOBS[name](folder / "nemotron_h")))
