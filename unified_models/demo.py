"""The promise on a tiny model: rollouts with policy-gradient updates between them, each logprob computed again by the
training forward, and next to it what the same model file gives under plain batch-shaped operators."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from unified_models.checkpoint import load, named_tensors
from unified_models.context.plain import PlainContext
from unified_models.context.slots import State
from unified_models.engine import Engine, Output, Sampling
from unified_models.model import LanguageModel
from unified_models.tiny import make_tiny
from unified_models.training import logprobs
from unified_models.verify.compare import Comparison, bits

# Inside and beyond a sliding window, and on all sides of chunks of 16 tokens; the last two close one soon after their
# prompt, and the last a window of 128, too.
PROMPT_LENGTHS = (5, 18, 61, 122)


@dataclass(frozen=True)
class Settings:
    """samples: rollouts of each prompt. tokens: sampled in the longest of them; the others end earlier, at different
    lengths, so that the batch shrinks to one. lr: of AdamW, on float32 masters."""

    samples: int = 4
    tokens: int = 24
    updates: int = 2
    lr: float = 3e-3
    seed: int = 0
    numerics: str = "deployed"

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("tokens", 1), ("updates", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}; at least {least}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr = {self.lr}; a positive number")


@dataclass(frozen=True)
class Row:
    """One rollout: engine against training forward (exact), and the same two under PlainContext (plain).

    apart: the largest |difference| of the plain pair, in nats. reward: mean over the sampled tokens. chunks: of the
    scan, filled by sampled tokens; 0 for a model without.
    """

    version: int
    exact: Comparison
    plain: Comparison
    apart: float
    reward: float
    chunks: int = 0


@dataclass
class Demo:
    """What one architecture showed."""

    name: str
    rows: list[Row] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every rollout compared tokens, and none had an unequal bit."""
        return bool(self.rows) and all(r.exact.compared and not r.exact.unequal for r in self.rows)

    def table(self) -> Table:
        """One row a rollout."""
        table = Table(title=f"{self.name}: logprobs of rollout and training forward")
        for header in ("weights", "tokens", "unequal", "plain: unequal", "plain: apart", "reward"):
            table.add_column(header, justify="right")
        for row in self.rows:
            mark = "[red]{}[/]" if row.exact.unequal or not row.exact.compared else "[green]{}[/]"
            table.add_row(
                f"version {row.version}",
                str(row.exact.compared),
                mark.format(row.exact.unequal),
                f"{row.plain.unequal} of {row.plain.compared}",
                f"{row.apart:.2g} nats",
                f"{row.reward:.3f}",
            )
        return table

    def story(self) -> str:
        """What the table shows, in sentences made of its numbers."""
        exact = sum((row.exact for row in self.rows), Comparison(0, 0))
        plain = sum((row.plain for row in self.rows), Comparison(0, 0))
        apart = max(row.apart for row in self.rows)
        ratio = f"{math.exp(apart):.3g}"
        ratio = f", an importance ratio of {ratio} instead of 1" if ratio != "1" else ""
        chunks = sum(row.chunks for row in self.rows)
        scanned = (
            f"On the way, sampled tokens filled {chunks} chunks of the scan, one row at a time; the training forward "
            f"runs such chunks whole. "
            if chunks
            else ""
        )
        first, last = self.rows[0].reward, self.rows[-1].reward
        return (
            f"The engine sampled {exact.compared} tokens under {len(self.rows)} versions of the weights; in the "
            f"training forward, the one that is differentiated, {exact.unequal} of their logprobs have other bits. "
            f"{scanned}The same model file under plain torch operators, whose sums follow the shape of the batch, "
            f"disagrees with itself on {plain.unequal} of {plain.compared}, by up to {apart:.2g} nats{ratio}. The "
            f"reward (share of even tokens) went from {first:.3f} to {last:.3f} in {len(self.rows) - 1} updates."
        )


def opening(name: str, settings: Settings) -> str:
    """What is about to happen."""
    return (
        f"{name}: a tiny random model, {settings.samples * len(PROMPT_LENGTHS)} rollouts of up to {settings.tokens} "
        f"tokens, {settings.updates} policy-gradient updates; up to half a minute ..."
    )


def run(name: str, folder: str | Path, settings: Settings) -> Iterator[Row]:
    """Make a tiny checkpoint in `folder`, then yield one row a rollout; the weights are updated between two rollouts.

    REINFORCE: an even token earns 1, an odd one 0, and the baseline is the mean over the rollout.
    """
    make_tiny(name, folder, seed=settings.seed)
    trainer, server = (load(folder, numerics=settings.numerics) for _ in range(2))
    engine, plain = Engine(server), Engine(server, context=PlainContext)
    trained = [p for p in trainer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0)
    trainer.commit_after(optimizer)
    prompts = make_prompts(trainer.config.vocab_size, settings)

    for version in range(settings.updates + 1):
        samplings = make_samplings(len(prompts), version, settings)
        outs = engine.generate(prompts, samplings)
        assert all(v == version for out in outs for v in out.versions), "tokens of another version"
        lps = of_sampled(logprobs(trainer, joined(prompts, outs)), prompts)
        reward = torch.tensor([float(token % 2 == 0) for out in outs for token in out.ids])
        exact = bits([out.logprobs for out in outs], lps)
        gap = plain_gap(plain, trainer, prompts, samplings)
        yield Row(version, exact, *gap, float(reward.mean()), filled(trainer, prompts, outs))
        if version < settings.updates:
            loss = -((reward - reward.mean()) * torch.cat(lps)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            engine.update_weights(named_tensors(trainer), version=version + 1)


@torch.no_grad()
def plain_gap(
    plain: Engine,
    trainer: LanguageModel,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
) -> tuple[Comparison, float]:
    """The same prompts rolled out by plain operators and computed again, in one pack, by plain operators: how many
    bits differ, and by how many nats."""
    outs = plain.generate(prompts, samplings)
    rolled = [out.logprobs for out in outs]
    packed = logprobs(trainer, joined(prompts, outs), context=PlainContext)
    again = of_sampled(packed, prompts)
    return bits(rolled, again), float((torch.cat(rolled) - torch.cat(again)).abs().max())


def filled(model: LanguageModel, prompts: Sequence[Sequence[int]], outs: Sequence[Output]) -> int:
    """Chunks of the scan that were filled by sampled tokens; the last one of each rollout was never run."""
    chunk = next((slot.chunk for slot in model.slots().values() if isinstance(slot, State)), 0)
    if not chunk:
        return 0
    ends = [
        (len(prompt), len(prompt) + len(out.ids) - 1)
        for prompt, out in zip(prompts, outs, strict=True)
    ]
    return sum(end // chunk - start // chunk for start, end in ends)


def make_prompts(vocab_size: int, settings: Settings) -> list[list[int]]:
    """Random ids; `samples` copies of each prompt side by side."""
    generator = torch.Generator().manual_seed(settings.seed)
    prompts = [
        torch.randint(vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]
    return [prompt for prompt in prompts for _ in range(settings.samples)]


def make_samplings(count: int, version: int, settings: Settings) -> list[Sampling]:
    """Lengths evenly spread up to `settings.tokens`, in a random order; other draws in each rollout and sequence."""
    generator = torch.Generator().manual_seed(settings.seed)
    shares = (torch.randperm(count, generator=generator) + 1).tolist()
    first = (settings.seed * (settings.updates + 1) + version) * count
    return [
        Sampling(max_tokens=max(1, settings.tokens * share // count), seed=first + i)
        for i, share in enumerate(shares)
    ]


def joined(prompts: Sequence[Sequence[int]], outs: Sequence[Output]) -> list[list[int]]:
    """Each prompt with what was sampled onto it."""
    return [[*prompt, *out.ids] for prompt, out in zip(prompts, outs, strict=True)]


def of_sampled(lps: Sequence[Tensor], prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logprobs of what follows each prompt, out of those of whole sequences."""
    return [lp[len(prompt) - 1 :] for lp, prompt in zip(lps, prompts, strict=True)]
