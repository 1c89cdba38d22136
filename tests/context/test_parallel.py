"""Experts and packs over several processes: stretches, and logprobs with the bits of one process."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import unified_models as um
from tests.processes import Partition, group_in, run
from unified_models import verify
from unified_models.context import collectives
from unified_models.context.parallel import Parallel, Stretch, stretches

VOCAB = 512
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 4],
        "num_hash_layers": 2,
    },
    "nemotron_h": {"config": Path(__file__).parents[2] / "configs/tiny/nemotron_h_mixed.json"},
}
LENGTHS = (300, 0, 1, 129, 64, 2, 17, 3, 15, 16, 63, 65, 127, 128)
ALL: Partition = ((0, 1, 2, 3),)
ROWS: Partition = ((0, 1), (2, 3))
COLUMNS: Partition = ((0, 2), (1, 3))
WARM = (0.7,)
EACH = tuple(0.5 + 0.07 * i for i in range(len(LENGTHS)))


class Case(NamedTuple):
    """Four processes: which share a pack, which share the experts. sequences: dealt to packs in turn.

    fault: one ulp of what process 1 gathers ("rows"), or one bit of a weight that it holds ("weight"), is wrong.
    """

    sequences: Sequence[Sequence[int]]
    tokens: Partition = ()
    experts: Partition = ()
    recompute: bool = False
    temperatures: Sequence[float] = WARM
    fault: str = ""

    def packs(self, rank: int) -> slice:
        """The sequences of this process's pack."""
        parts = self.tokens or [[r] for r in range(4)]
        return slice(next(i for i, ranks in enumerate(parts) if rank in ranks), None, len(parts))

    def temperature(self, part: slice) -> float | list[float]:
        one = len(self.temperatures) == 1
        return self.temperatures[0] if one else list(self.temperatures[part])

    def run(self, model: Any, parallel: Parallel) -> list[Tensor]:
        """This process's logprobs; recomputed: after a backward, which also must come to its end."""
        part = self.packs(dist.get_rank())
        out = um.logprobs(
            model,
            self.sequences[part],
            self.temperature(part),
            recompute=self.recompute,
            parallel=parallel,
        )
        if self.recompute:
            torch.cat(out).sum().backward()
        return [values.detach() for values in out]


def sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(VOCAB) for _ in range(n)] for n in lengths]


def parallel_of(case: Case, groups: dict[Partition, Any]) -> Parallel:
    return Parallel(experts=groups[case.experts], tokens=groups[case.tokens])


def strike(case: Case, model: Any) -> None:
    """Put the fault of a case in, on process 1 alone."""
    if dist.get_rank() != 1:
        return
    if case.fault == "weight":
        up = next(weight for path, weight in model.weights() if path.endswith("experts.up"))
        codes = up().packed[up.packed_names[0]].view(torch.uint8)
        codes[:, 0, 0] ^= 1
    elif case.fault == "rows":
        collectives._all_gather = partial(gathered_wrongly, collectives._all_gather)


def gathered_wrongly(rightly: Any, x: Tensor, counts: Sequence[int], group: Any) -> Tensor:
    """The row before this process's first, all its values off by one ulp. Logprobs come as they are."""
    rows = rightly(x, counts, group)
    if x.dim() > 1 and counts[0]:
        row = rows[counts[0] - 1]
        row.copy_((verify.compare.patterns(row) + 1).view(row.dtype))
    return rows


def job(folder: Path, cases: dict[str, Case]) -> dict[str, list[Tensor]]:
    """The logprobs of each case; a case without a partition of the experts runs with all of them."""
    needed = {case.tokens for case in cases.values()} | {case.experts for case in cases.values()}
    groups = {each: group_in(each) for each in sorted(needed, key=repr)}
    models: dict[Partition, Any] = {}
    out = {}
    for name, case in cases.items():
        if case.experts not in models or case.fault == "weight":
            group = groups[case.experts]
            held = (dist.get_rank(group), dist.get_world_size(group)) if case.experts else (0, 1)
            models[case.experts] = um.load(folder, experts=held, progress=False)
        kept = collectives._all_gather
        strike(case, models[case.experts])
        out[name] = case.run(models[case.experts], parallel_of(case, groups))
        collectives._all_gather = kept
    return out


def compared(
    answers: list[dict[str, list[Tensor]]], name: str, case: Case, want: list[Tensor]
) -> verify.compare.Comparison:
    """All processes' logprobs of a case against one process's."""
    total = verify.bits([], [])
    for rank, answer in enumerate(answers):
        one = verify.bits(answer[name], want[case.packs(rank)])
        assert one.compared == sum(max(len(s) - 1, 0) for s in case.sequences[case.packs(rank)])
        total += one
    return total


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel") / request.param
    um.make_tiny(request.param, folder, seed=3, **MODELS[request.param])
    return folder


@pytest.mark.slow(120)
def test_logprobs_have_the_bits_of_one_process(folder: Path, tmp_path: Path) -> None:
    """CP 2 and 4, EP 2 and 4, both over the same processes and across; recomputed with a temperature a sequence, and
    not, with one; what the engine of one process sampled. The controls: a fault of one ulp in one process is found."""
    model = um.load(folder)
    prompts = sequences((5, 33, 70, 130), seed=1)
    outs = um.Engine(model).generate(prompts, um.Sampling(max_tokens=12, temperature=0.7))
    sampled = [[*p, *out.ids] for p, out in zip(prompts, outs, strict=True)]
    given_ = sequences(LENGTHS)
    layouts = {
        "CP 2": (ROWS, ()),
        "CP 4": (ALL, ()),
        "EP 2": ((), ROWS),
        "EP 4": ((), ALL),
        "CP 2 x EP 2": (ROWS, COLUMNS),
        "CP 4 and EP 4": (ALL, ALL),
    }
    cases = {}
    for name, layout in layouts.items():
        cases[name] = Case(given_, *layout)
        cases[f"{name}, recomputed"] = Case(given_, *layout, recompute=True, temperatures=EACH)
    for name in ("CP 4", "EP 4", "CP 2 x EP 2"):
        cases[f"{name}, sampled"] = Case(sampled, *layouts[name])
    cases["CP 4, a row off"] = Case(given_, ALL, fault="rows")
    cases["EP 4, a weight off"] = Case(given_, (), ALL, fault="weight")
    answers = run(job, 4, tmp_path, folder, cases, patience=400)
    with torch.no_grad():
        want = {WARM: um.logprobs(model, given_, 0.7), EACH: um.logprobs(model, given_, list(EACH))}
    assert verify.bits(want[WARM], want[EACH]).unequal > 0
    for name, case in cases.items():
        same = case.sequences is given_
        expected = want[case.temperatures] if same else um.logprobs(model, sampled, 0.7)
        found = compared(answers, name, case, expected)
        assert found.compared >= sum(max(len(s) - 1, 0) for s in case.sequences) > 200
        assert (found.unequal > 0) == bool(case.fault), f"{name}: {found}"
        if not same:
            for rank, answer in enumerate(answers):
                mine = case.packs(rank)
                scored = zip(answer[name], prompts[mine], outs[mine], strict=True)
                parts = [(lps[len(p) - 1 :], out.logprobs) for lps, p, out in scored]
                rolled = verify.bits([a for a, _ in parts], [b for _, b in parts])
                assert rolled.unequal == 0 and rolled.compared == 12 * len(parts) > 0


@pytest.mark.slow(40)
def test_packed_is_alone_F04_F05(folder: Path, tmp_path: Path) -> None:
    """Documents of odd lengths in one pack, cut in the middle of one, against each alone: cut over the two processes
    as well, and in one. A document of one token has fewer than there are processes."""
    documents = sequences((1, 3, 7, 100, 200, 5))
    pairs = (ROWS[0],)
    cases = {"packed": Case(documents, pairs)}
    cases |= {f"alone {i}": Case([document], pairs) for i, document in enumerate(documents)}
    answers = run(job, 2, tmp_path, folder, cases)
    model = um.load(folder)
    with torch.no_grad():
        apart = [um.logprobs(model, [document], 0.7)[0] for document in documents]
        shifted = um.logprobs(model, [[9, *document] for document in documents], 0.7)
    found = compared(answers, "packed", cases["packed"], apart)
    assert (found.unequal, found.compared) == (0, 2 * (0 + 2 + 6 + 99 + 199 + 4))
    for i, document in enumerate(documents):
        name = f"alone {i}"
        found = compared(answers, name, cases[name], apart[i : i + 1])
        assert (found.unequal, found.compared) == (0, 2 * (len(document) - 1))
    assert verify.bits([lps[1:] for lps in shifted], apart).unequal > 200, "the control"


LENGTHS_OF_PACKS = st.lists(st.integers(0, 40), max_size=8)


@settings(max_examples=300, deadline=None)
@given(LENGTHS_OF_PACKS, st.integers(1, 9))
@example([], 3)
@example([0, 0], 2)
@example([1], 4)
@example([0, 2, 0, 0, 1, 0], 8)
def test_stretches_are_a_pack_cut_evenly(lengths: list[int], count: int) -> None:
    """Each token is in one stretch, in order, and sizes differ by one at most; against a list of all tokens."""
    tokens = [(s, p) for s, length in enumerate(lengths) for p in range(length)]
    cuts = stretches(lengths, count)
    assert len(cuts) == count and cuts[0].start == 0 and cuts[-1].end == len(tokens)
    sizes = [cut.end - cut.start for cut in cuts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 0
    assert all(a.end == b.start for a, b in pairwise(cuts))
    for cut in cuts:
        assert unrolled(cut) == tokens[cut.start : cut.end]
        assert len(cut.lengths) == len(cut.past) and 0 not in (*cut.lengths[:1], *cut.lengths[-1:])


def unrolled(cut: Stretch) -> list[tuple[int, int]]:
    """(sequence, position) of each token that a stretch says it has; sequences without tokens are not counted."""
    step = cut.step("cpu")
    starts = zip(step.sequence_T.tolist(), step.positions_T.tolist(), strict=True)
    return [(cut.first + s, p) for s, p in starts]
