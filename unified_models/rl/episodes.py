"""Conversations: the model's turns and the tool's, as one sequence of tokens with a response mask."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from unified_models.engine import Sampling
from unified_models.rl.rollout import Rollout
from unified_models.rl.tasks import Part, Problem, Task
from unified_models.rl.tasks.tokenizer import EOS, decode, encode

STOPS = (EOS, ord("\n"))


@dataclass
class Episode:
    """ids: the whole conversation. said: which of them the model sampled. logprobs, versions: of those, in order.

    truncated: a turn of the model ended by its length. reward: None until the conversation is over.
    """

    problem: Problem
    ids: list[int]
    said: list[bool]
    turns: list[str] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False
    reward: float | None = None

    @property
    def sampled(self) -> Tensor:
        """float32 logprobs that the engine reported, one a sampled token."""
        return torch.cat(self.logprobs) if self.logprobs else torch.zeros(0)

    def of_sampled(self, lps: Tensor) -> Tensor:
        """The logprobs of the sampled tokens, out of those of tokens 1 .. of the whole sequence."""
        return lps[torch.tensor(self.said[1:])]

    def hear(self, text: str) -> None:
        """Text that the model did not say."""
        self.ids += (heard := encode(text))
        self.said += [False] * len(heard)


def roll_out(
    rollout: Rollout,
    task: Task,
    *,
    seed: int,
    step: int,
    prompts: int,
    group: int,
    temperature: float,
) -> list[Episode]:
    """`group` conversations about each of `prompts` problems, side by side; every draw is a function of the seed, the
    step, the place and the turn. A later turn's prompt begins with all that was said before."""
    problems = [task.problem(seed, step, i) for i in range(prompts) for _ in range(group)]
    episodes = [Episode(p, ids := encode(p.text), [False] * len(ids)) for p in problems]
    turn = 0
    while talking := [(i, e) for i, e in enumerate(episodes) if e.reward is None]:
        samplings = [
            Sampling(task.max_tokens, temperature, draw_seed(seed, step, i, turn), STOPS)
            for i, _ in talking
        ]
        outs = rollout.generate([e.ids for _, e in talking], samplings)
        for (_, episode), out in zip(talking, outs, strict=True):
            episode.ids = [*episode.ids, *out.ids]
            episode.said += [True] * len(out.ids)
            episode.turns.append(decode(out.ids))
            episode.logprobs.append(out.logprobs)
            episode.versions += out.versions
            episode.truncated |= out.reason == "length" and out.ids[-1] not in STOPS
            heard = task.reply(episode.problem, episode.turns)
            if heard is None:
                episode.reward = task.reward(episode.problem, episode.turns)
            else:
                episode.hear(heard)
        turn += 1
    return episodes


def draw_seed(*key: int) -> int:
    """A seed for one turn: 63 bits of a hash of the key."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def demonstrated(parts: Sequence[Part]) -> tuple[list[int], list[bool]]:
    """Token ids of a demonstration, and which of them the model is to say."""
    ids = [token for part in parts for token in part.ids]
    return ids, [part.said for part in parts for _ in part.ids]
