"""The verification of a checkpoint: every kind of schedule against the training forward, and the control."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from unified_models.checkpoint import load
from unified_models.fingerprint import Fingerprint
from unified_models.model import LanguageModel
from unified_models.progress import bar
from unified_models.training import logprobs
from unified_models.verify.control import control
from unified_models.verify.counters import absent, chunks, strides
from unified_models.verify.lengths import default_lengths
from unified_models.verify.locate import locate
from unified_models.verify.report import Key, Report
from unified_models.verify.schedule import KINDS, STREAM, Kind, Material, Scored
from unified_models.verify.trace import Trace, recording
from unified_models.verify.watch import Watch

MOST_LOCATED = 3  # unequal runs that are traced, each of which runs four times more
QUICK = 65  # tokens of the longest sequence of a quick run


def verify_folder(
    folder: str | Path,
    *,
    numerics: Sequence[str] = ("deployed", "float32"),
    threads: Sequence[int] = (1, 2),
    tokens: int = 20000,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    kinds: Sequence[Kind] | None = None,
    quick: bool = False,
    progress: bool = True,
    device: str = "cpu",
) -> Report:
    """Run every kind of schedule at every length, and compare each token's logprob with the training forward of its
    sequence alone, on one thread.

    Args:
        tokens: the least to compare; the table is run again, under other schedules, until there are as many.
        lengths: of the sequences; None: `default_lengths`.
        kinds: of schedules; None: all that are for the model.
        quick: lengths up to 65, one thread, any number of tokens; nothing is demanded of the counters.
        device: of the model; on a GPU the number of threads changes nothing.

    On a busy machine two OpenMP threads that spin make this several times slower: set OMP_WAIT_POLICY=PASSIVE before
    torch is imported, as the command line does. Raises ValueError where there is nothing to run.
    """
    if not numerics or not threads or (kinds is not None and not kinds):
        raise ValueError(f"nothing to run: numerics {numerics}, threads {threads}, kinds {kinds}")
    threads, tokens = (threads[:1], 0) if quick else (threads, tokens)
    report = Report(str(folder), seed, tokens)
    began, before = time.perf_counter(), torch.get_num_threads()
    models = {n: load(folder, device=device, numerics=n, progress=progress) for n in numerics}
    model = models[numerics[0]]
    kinds = chosen(model, quick) if kinds is None else kinds
    lengths = sorted(set(default_lengths(model) if lengths is None else lengths))
    lengths = [length for length in lengths if length <= QUICK] if quick else lengths
    if not lengths or lengths[-1] < 3:
        raise ValueError(f"lengths must reach 3 tokens, got {lengths}")
    benches = [Bench(made, name, report, lengths, seed) for name, made in models.items()]
    steps = len(benches) * (len(kinds) * len(threads) + 1)
    try:
        with bar("verifying", steps, wanted=progress) as shown:
            turn = 0
            while turn == 0 or report.total.compared < tokens:
                for bench in benches:
                    for count in threads:
                        for kind in kinds:
                            bench.run(kind, count, turn)
                            shown.advance(1)
                        turn += 1
            for bench in benches:
                bench.control()
                shown.advance(1)
    finally:
        torch.set_num_threads(before)
    report.demanded = not quick
    report.absent = absent(model, {note for bench in benches for note in bench.notes})
    report.seconds = time.perf_counter() - began
    return report


def chosen(model: LanguageModel, quick: bool) -> list[Kind]:
    """The kinds that are for a model; a quick run has no sequences but its own short ones."""
    return [kind for kind in KINDS if kind.where(model) and not (quick and kind.lengths)]


@dataclass
class Bench:
    """One model under one numerics, its references, and where the results go."""

    model: LanguageModel
    numerics: str
    report: Report
    lengths: Sequence[int]
    seed: int
    notes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.report.fingerprints[self.numerics] = asdict(Fingerprint.of(self.model))
        self._references: dict[tuple[Any, int, float], list[tuple[list[int], Tensor]]] = {}

    def material(self, kind: Kind, turn: int) -> Material:
        """What a turn runs; every turn of a run has the same sequences, so that they share references."""
        random = Random(f"tokens {self.seed}")
        vocab = self.model.config.vocab_size
        most = getattr(self.model.config, "max_position_embeddings", STREAM)
        lengths = sorted({min(length, most) for length in kind.lengths}) or self.lengths
        sequences = [[random.randrange(vocab) for _ in range(length)] for length in lengths]
        return Material(sequences, self.seed, turn)

    def run(self, kind: Kind, threads: int, turn: int) -> None:
        """Fill a column of the table."""
        material = self.material(kind, turn)
        torch.set_num_threads(threads)
        watch, began = self._watch(kind), time.perf_counter()
        scored = list(kind.run(material, watch, self._random(kind, turn)))
        watch.finish()
        self.report.columns[kind.name] += time.perf_counter() - began
        torch.set_num_threads(1)
        bad: Scored | None = None
        for one in scored:
            length = len(material.sequences[one.number])
            cell = self.report.cells[Key(self.numerics, threads, kind.name, length)]
            if cell.add(self._reference(kind, one), one.logprobs).unequal:
                bad = bad or one
        if bad is not None and len(self.report.differences) < MOST_LOCATED:
            torch.set_num_threads(threads)
            self.report.differences.append(self._locate(kind, material, turn, bad))
            torch.set_num_threads(1)

    def control(self) -> None:
        """On one sequence, long enough for an entry of every stride, and to go on from the state of every scan."""
        spans = [*strides(self.model), *chunks(self.model)]
        length = max([9, *(span + 5 for span in spans if span + 5 <= self.lengths[-1])])
        random = Random(f"control {self.seed}")
        sequence = [random.randrange(self.model.config.vocab_size) for _ in range(length)]
        result = control(self.model, sequence, self.seed)
        self.report.controls[self.numerics] = str(result)
        self.report.faults += [f"{self.numerics}: {fault}" for fault in result.faults()]

    def _watch(self, kind: Kind, trace: Trace | None = None) -> Watch:
        return Watch(self.model, self.report.counters, kind.base, trace, self.notes)

    def _random(self, kind: Kind, turn: int) -> Random:
        return Random(f"{kind.name} {turn} {self.seed}")

    def _reference(self, kind: Kind, one: Scored) -> Tensor:
        """The training forward of the sequence alone; that of a longer one with the same beginning will do."""
        known = self._references.setdefault((kind.base, one.number, one.temperature), [])
        whole = list(one.sequence)
        found = [values for sequence, values in known if sequence[: len(whole)] == whole]
        if not found:
            with torch.no_grad():
                context = self._watch(kind).pack([one.number])
                values = logprobs(self.model, [whole], one.temperature, context=context)[0].cpu()
            known.append((whole, values))
            found = [values]
        start = max(one.start - 1, 0)
        return found[0][start : start + one.expected]

    def _locate(self, kind: Kind, material: Material, turn: int, bad: Scored) -> str:
        """Run the reference and the schedule again, looking at every operator."""

        def schedule(trace: Trace) -> None:
            with recording(self.model, trace):
                list(kind.run(material, self._watch(kind, trace), self._random(kind, turn)))

        def reference(trace: Trace) -> None:
            with recording(self.model, trace), torch.no_grad():
                context = self._watch(kind, trace).pack([bad.number])
                logprobs(self.model, [bad.sequence], bad.temperature, context=context)

        found = locate(reference, schedule, [bad.number])
        what = f"{self.numerics}, {kind.name}: "
        return what + (str(found) if found else "no operator differs when the schedule runs again")
