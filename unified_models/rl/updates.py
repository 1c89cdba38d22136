"""The updates of one step: logprobs of the old policy, the comparison, and a loss for each part of the batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unified_models.rl.check import Checked, check
from unified_models.rl.config import Config
from unified_models.rl.episodes import Episode
from unified_models.rl.losses import Terms, Tokens, advantages, policy_loss, weights
from unified_models.rl.trainer import Trainer


class Updates:
    """config.train.updates updates on the episodes of one step, all sampled under one weight version.

    `take_old`, then `run`, then `told`. Each update takes whole groups; the last ones see tokens that are some
    versions old (`staleness`).
    """

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        reference: Trainer | None,
        episodes: Sequence[Episode],
        version: int,
    ) -> None:
        self.config, self.trainer, self.reference = config, trainer, reference
        self.episodes, self.version = episodes, version
        rewards = [e.reward for e in episodes]
        self.rewards_S = torch.tensor(rewards, dtype=torch.float32)
        self.advantage_S = advantages(self.rewards_S, config.rollout.group)
        self.old: list[Tensor] = []
        self.referred: list[Tensor] = []
        self.checked: list[Checked] = []
        self.terms: list[Terms] = []
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.staleness = 0
        self.reused = False

    @property
    def sequences(self) -> list[list[int]]:
        """Token ids of all episodes."""
        return [e.ids for e in self.episodes]

    def take_old(self, reuse: bool) -> None:
        """Logprobs of the sampled tokens under the old policy: by a training forward, which is compared with what the
        engine reported; or, with `reuse`, what the engine reported. UnequalError as in `check`."""
        temperature = self.config.rollout.temperature
        self.reused = reuse
        if reuse:
            self.old = [e.sampled for e in self.episodes]
        else:
            lps = self.trainer.logprobs(self.sequences, temperature)
            self._check(self.episodes, lps, range(len(lps)))
            self.old = [e.of_sampled(lp) for e, lp in zip(self.episodes, lps, strict=True)]
        if self.reference is not None:
            lps = self.reference.logprobs(self.sequences, temperature)
            self.referred = [e.of_sampled(lp) for e, lp in zip(self.episodes, lps, strict=True)]

    def _check(self, episodes: Sequence[Episode], lps: Sequence[Tensor], places: range) -> None:
        if self.config.checking != "off":
            stop = self.config.checking == "stop"
            self.checked.append(check(episodes, lps, self.version, stop=stop, places=places))

    def run(self) -> None:
        """The updates, one after the other. UnequalError as in `check`, before any weight has changed."""
        each = len(self.episodes) // self.config.train.updates
        for start in range(0, len(self.episodes), each):
            self._update(range(start, start + each))

    def _update(self, part: range) -> None:
        config, episodes = self.config, [self.episodes[i] for i in part]
        self.staleness = self.trainer.version - self.version
        weight_S = weights(
            config.loss.kind,
            [len(e.versions) for e in episodes],
            self.rewards_S[part.start : part.stop],
            [e.truncated for e in episodes],
            config.rollout.group,
        )

        def loss(lps: list[Tensor], places: range) -> Tensor:
            own = [episodes[i] for i in places]
            at = range(part.start + places.start, part.start + places.stop)
            if self.reused and self.staleness == 0:
                self._check(own, lps, at)
            tokens = self._tokens(at, weight_S[places.start : places.stop])
            said = torch.cat([e.of_sampled(lp) for e, lp in zip(own, lps, strict=True)])
            told = config.loss
            terms = policy_loss(
                said,
                tokens,
                clip_low=told.clip_low,
                clip_high=told.clip_high,
                correction=told.correction,
                cap=told.cap,
                kl_coef=told.kl_coef,
            )
            self.terms.append(terms)
            return terms.loss

        result = self.trainer.step([e.ids for e in episodes], config.rollout.temperature, loss)
        self.losses.append(result.loss)
        self.norms.append(result.grad_norm)

    def _tokens(self, at: range, weight_S: Tensor) -> Tokens:
        """Of the episodes at these places, sampled tokens only, one after the other."""
        lengths = torch.tensor([len(self.episodes[i].versions) for i in at])
        return Tokens(
            old=torch.cat([self.old[i] for i in at]),
            rollout=torch.cat([self.episodes[i].sampled for i in at]),
            advantage=self.advantage_S[at.start : at.stop].repeat_interleave(lengths),
            weight=weight_S.repeat_interleave(lengths),
            reference=torch.cat([self.referred[i] for i in at]) if self.referred else None,
        )

    def told(self) -> dict[str, Any]:
        """The metrics of the step, without times. None where check = "off"."""
        tokens = sum(len(e.versions) for e in self.episodes)
        lps = torch.cat([e.sampled for e in self.episodes]).double()
        compared = sum(c.bits.compared for c in self.checked)
        valid = sum(c.gap.valid for c in self.checked)
        mean = {
            key: sum(getattr(c.gap, key) * c.gap.valid for c in self.checked) / max(valid, 1)
            for key in ("k3", "mean")
        }
        on = bool(self.checked)
        return {
            "reward": float(self.rewards_S.double().mean()),
            "kl": mean["k3"] if on else None,
            "apart": mean["mean"] if on else None,
            "unequal": sum(c.bits.unequal for c in self.checked) if on else None,
            "compared": compared if on else None,
            "entropy": float(-lps.mean()),
            "loss": sum(self.losses) / len(self.losses),
            "grad_norm": sum(self.norms) / len(self.norms),
            "clip_fraction": sum(t.clipped for t in self.terms) / tokens,
            "ratio_off": max(t.furthest for t in self.terms),
            "staleness": self.staleness,
            "truncated": sum(e.truncated for e in self.episodes),
            "reused": self.reused,
        }
