"""How likely drafted tokens are to be accepted, learned within one request from what became of earlier ones.

Knows kinds of tokens and outcomes; nothing of what a pass costs, nor of token ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Levels, in log-odds, that the acceptance of a request may be at.
_LEVELS = tuple(-4.5 + 0.75 * step for step in range(14))  # 0.011 to 0.995


def _logistic(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


class Acceptance:
    """Chances of drafted tokens of several kinds: positions in a draft, say, or lengths of a match.

    Text changes its nature within a request: code, then prose. So what is tracked is not a mean but a *level* that
    mostly stays and now and then jumps, as the probabilities of a few levels (the forward filter of a hidden Markov
    model): many steady outcomes make it sure, a few contrary ones move it. A kind differs from the level by `offsets`
    in log-odds, known beforehand, and by a factor learned here; a kind that was rarely seen takes after its neighbour.
    """

    # Chance that the text changed its nature between two rounds.
    _change = 0.02
    # A kind's factor counts about so many outcomes, and before any, so many of its neighbour's.
    _memory, _shrinkage = 100.0, 8.0

    def __init__(self, offsets: Sequence[float], accepted: float, rejected: float) -> None:
        """Begin as if `accepted` and `rejected` tokens had been seen: the weights of a beta distribution."""
        chances = [_logistic(level) for level in _LEVELS]
        # In log-odds the density of a beta distribution is this, since dp = p (1 - p) dx.
        prior = [chance**accepted * (1 - chance) ** rejected for chance in chances]
        self._prior = [weight / sum(prior) for weight in prior]
        self._belief = list(self._prior)  # (levels,)
        self._chances = [[_logistic(level + offset) for level in _LEVELS] for offset in offsets]  # (kinds, levels)
        self._accepted = [0.0] * len(offsets)
        self._expected = [0.0] * len(offsets)

    def reach(self, kinds: Sequence[int]) -> list[float]:
        """Chances that the first, the first two, ... of tokens of these kinds are all accepted."""
        factors = self._factors()
        surviving, chances = list(self._belief), []
        for kind in kinds:
            factor = factors[kind]
            surviving = [
                weight * min(0.995, factor * chance)
                for weight, chance in zip(surviving, self._chances[kind], strict=True)
            ]
            chances.append(sum(surviving))
        return chances

    def observe(self, kinds: Sequence[int], accepted: int) -> None:
        """Of tokens of these kinds the first `accepted` were accepted; the next, if any, was not."""
        factors = self._factors()
        belief = [
            (1 - self._change) * weight + self._change * prior
            for weight, prior in zip(self._belief, self._prior, strict=True)
        ]
        for index, kind in enumerate(kinds[: accepted + 1]):
            chances = [min(0.995, factors[kind] * chance) for chance in self._chances[kind]]
            plain = sum(weight * chance for weight, chance in zip(belief, self._chances[kind], strict=True))
            keep = 1 - 1 / self._memory
            self._accepted[kind] = keep * self._accepted[kind] + (index < accepted)
            self._expected[kind] = keep * self._expected[kind] + plain
            likelihood = chances if index < accepted else [1 - chance for chance in chances]
            belief = [weight * chance for weight, chance in zip(belief, likelihood, strict=True)]
            total = sum(belief)
            belief = [weight / total for weight in belief]
        self._belief = belief

    def _factors(self) -> list[float]:
        factors, neighbour = [], 1.0
        for accepted, expected in zip(self._accepted, self._expected, strict=True):
            neighbour = (accepted + self._shrinkage * neighbour) / (expected + self._shrinkage)
            factors.append(neighbour)
        return factors
