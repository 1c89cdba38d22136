"""Each sampled token's logprob as the engine reported it, against the training forward under the same weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from unified_models.rl.episodes import Episode
from unified_models.verify.compare import Comparison, Gap, UnequalError, bits, gap


@dataclass(frozen=True)
class Checked:
    """bits: raw 32-bit patterns. gap: k3 and others, over the same tokens; they never decide."""

    bits: Comparison
    gap: Gap


def check(
    episodes: Sequence[Episode],
    lps: Sequence[Tensor],
    version: int,
    *,
    stop: bool,
    places: Sequence[int] | None = None,
) -> Checked:
    """Compare the sampled tokens of episodes with `lps`, the training forward's logprobs of whole sequences.

    version: of the weights that computed lps. stop: raise on an unequal bit. places: of the episodes in the batch, as
    errors name them; None: 0, 1, ..

    Raises:
        ValueError: a token was sampled under another version; both are named.
        UnequalError: nothing was compared; or, if `stop`, the first token with other bits, with both patterns.
    """
    places = range(len(episodes)) if places is None else places
    for place, episode in zip(places, episodes, strict=True):
        for j, own in enumerate(episode.versions):
            if own != version:
                raise ValueError(
                    f"sequence {place}, sampled token {j}: of weight version {own}, compared under {version}"
                )
    reported = [e.sampled for e in episodes]
    again = [e.of_sampled(lp.detach().cpu()) for e, lp in zip(episodes, lps, strict=True)]
    result = bits(reported, again)
    if result.compared == 0:
        raise UnequalError(f"weight version {version}: nothing was compared (0 sampled tokens)")
    if result.unequal and stop:
        assert result.first is not None
        (i, j), a, b = result.first
        raise UnequalError(
            f"weight version {version}: {result.unequal} of {result.compared} sampled tokens have other bits in the "
            f"training forward; the first is sequence {places[i]}, sampled token {j} (id {_id(episodes[i], j)}): "
            f"rollout {a:#010x}, training {b:#010x}"
        )
    return Checked(result, gap(reported, again))


def _id(episode: Episode, sampled: int) -> int:
    return [token for token, said in zip(episode.ids, episode.said, strict=True) if said][sampled]
