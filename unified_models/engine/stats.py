"""What an engine has done since it was made."""

from dataclasses import dataclass


@dataclass
class Stats:
    """Counts of tokens unless the name says otherwise; seconds are wall time.

    prefix_hits: tokens not run, because their rows were found in memory. tokens_recomputed: tokens run again after a
    preemption or a weight update. mixed_steps: steps in which one sequence continued after a sampled token and
    another ran given tokens. waited_for_state: requests that waited, a seat being free, for a place for their scan
    state. seconds_logprob: logits and their logprobs; choosing tokens is part of the rest. peak_pages: the most pages
    in use in a step, over all groups of slots.
    """

    prefix_cache: bool
    weight_version: int = 0
    steps: int = 0
    mixed_steps: int = 0
    tokens: int = 0
    tokens_sampled: int = 0
    tokens_scored: int = 0
    tokens_recomputed: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    waited_for_state: int = 0
    updates: int = 0
    peak_pages: int = 0
    seconds_forward: float = 0.0
    seconds_logprob: float = 0.0
    seconds_total: float = 0.0

    @property
    def seconds_overhead(self) -> float:
        """Time in steps outside of the model and the logprobs."""
        return self.seconds_total - self.seconds_forward - self.seconds_logprob
