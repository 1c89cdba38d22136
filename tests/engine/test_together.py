"""Engines that share a model's experts: each with its own requests, stepping together. B17: idle ones take part."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unified_models as um
from tests.processes import run
from unified_models.context.parallel import Parallel

TINY = Path(__file__).parents[2] / "configs/tiny"
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "nemotron_h": {"config": TINY / "nemotron_h_mixed.json"},
}
PROMPTS = [[[1, 2, 3], [4] * 40], [[7, 8]], [], [[9] * 17, [10, 11], [5]]]
"""Of each round, the prompts of all processes; process r takes every other one."""
SAMPLING = um.Sampling(max_tokens=9, temperature=0.7, seed=4)


def served(folder: Path) -> list[tuple[list[int], torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = um.load(folder, progress=False, experts=(rank, size))
    engine = um.Engine(model, step_tokens=16, parallel=Parallel(experts=dist.group.WORLD))
    found = []
    for prompts in PROMPTS:
        outs = engine.generate(prompts[rank::size], [SAMPLING] * len(prompts[rank::size]))
        found += [(out.ids, out.logprobs) for out in outs]
    for lp in engine.score([[1, 2, 3, 4]] * (1 - rank)):
        found.append(([2, 3, 4], lp))
    return found


@pytest.mark.slow(30)
@pytest.mark.parametrize("name", MODELS)
def test_engines_that_share_experts_give_the_bits_of_one_B17(name: str, tmp_path: Path) -> None:
    um.make_tiny(name, tmp_path / name, seed=2, **MODELS[name])
    model = um.load(tmp_path / name, progress=False)
    answers = run(served, 2, tmp_path, tmp_path / name)
    engine, compared = um.Engine(model), 0
    for rank, found in enumerate(answers):
        mine = [prompt for prompts in PROMPTS for prompt in prompts[rank::2]]
        assert len(found) == len(mine) + (1 - rank)
        for prompt, (ids, logprobs) in zip(mine, found, strict=False):
            (alone,) = engine.generate([prompt], [SAMPLING])
            assert alone.ids == ids
            (trained,) = um.logprobs(model, [prompt + ids], 0.7)
            for other in (alone.logprobs, trained[len(prompt) - 1 :]):
                told = um.verify.bits([logprobs], [other])
                assert (told.compared, told.unequal) == (9, 0)
                compared += told.compared
    told = um.verify.bits([answers[0][-1][1]], um.logprobs(model, [[1, 2, 3, 4]]))
    assert (told.compared, told.unequal) == (3, 0) and compared == 2 * 9 * 6
