"""How likely drafted tokens are to be accepted, learned within one request from what became of earlier ones.

Knows kinds of tokens and outcomes; nothing of what a pass costs, nor of token ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

# Levels, in log-odds, that the acceptance of a request may be at: 0.011 to 0.995.
_LEVELS = tuple(-4.5 + 0.75 * step for step in range(14))
# Nothing is certain, and what was never seen must stay possible.
_MOST = 0.995


class Acceptance:
    """Chances of drafted tokens of several kinds: positions in a draft, say, or lengths of a match.

    Text changes its nature within a request: code, then prose. So what is tracked is not a mean but a level that
    mostly stays and now and then jumps, as the probabilities of a few levels (the forward filter of a hidden Markov
    model): many steady outcomes make it sure, a few contrary ones move it. A kind differs from the level by what is
    known beforehand (`offsets`, in log-odds, times one of `slopes`, which is learned likewise: how much kinds mean
    in this request), and by a factor of its own, near its neighbour's until it was seen often.
    """

    # Chances that the level jumps: between two rounds that are observed, and in a round that is not. What is not
    # observed counts less, since it must not make a drafter promising by itself that has failed so far.
    _change, _change_unseen = 0.01, 0.003
    # A kind's factor remembers about so many outcomes, and weighs so many expected ones against them.
    _memory, _shrinkage = 100.0, 20.0

    def __init__(
        self,
        offsets: Sequence[float],
        *,
        accepted: float,
        rejected: float,
        hopeless: float = 0.0,
        slopes: Sequence[float] = (1.0,),
    ) -> None:
        """Begin as if `accepted` and `rejected` tokens had been seen (the weights of a beta distribution), but for a
        chance of `hopeless` that hardly any is ever accepted, which a few rejections then make likely."""
        # The beta's density in log-odds, where dp = p (1 - p) dx.
        beta = [_logistic(level) ** accepted * _logistic(-level) ** rejected for level in _LEVELS]
        self._prior = [(1 - hopeless) * weight / sum(beta) for weight in beta]
        self._prior[0] += hopeless
        self._slopes = len(slopes)
        # Of each slope and level, one after the other, (slopes * levels,).
        self._belief = [weight / len(slopes) for _ in slopes for weight in self._prior]
        self._chances = [
            [_logistic(level + slope * offset) for slope in slopes for level in _LEVELS] for offset in offsets
        ]  # (kinds, slopes * levels)
        self._accepted = [0.0] * len(offsets)
        self._expected = [0.0] * len(offsets)
        self._learned = self._with_factors()

    def reach(self, kinds: Sequence[int]) -> list[float]:
        """Chances that the first, the first two, ... of tokens of these kinds are all accepted."""
        surviving, chances = self._belief, []
        for kind in kinds:
            surviving = list(map(mul, surviving, self._learned[kind]))
            chances.append(sum(surviving))
        return chances

    def observe(self, kinds: Sequence[int], accepted: int) -> None:
        """Of tokens of these kinds the first `accepted` were accepted; the next, if any, was not."""
        belief = self._jumped(self._change)
        for index, kind in enumerate(kinds[: accepted + 1]):
            outcome = index < accepted
            self._accepted[kind] += outcome - self._accepted[kind] / self._memory
            self._expected[kind] += sum(map(mul, belief, self._chances[kind])) - self._expected[kind] / self._memory
            chances = self._learned[kind]
            belief = list(map(mul, belief, chances if outcome else [1 - chance for chance in chances]))
            total = sum(belief)
            belief = [weight / total for weight in belief]
        self._belief = belief
        self._learned = self._with_factors()

    def rest(self) -> None:
        """A round went by without an outcome."""
        self._belief = self._jumped(self._change_unseen)

    def _jumped(self, change: float) -> list[float]:
        """The belief after the level may have jumped; what a kind means stays."""
        belief, levels = [], len(_LEVELS)
        for slope in range(self._slopes):
            weights = self._belief[slope * levels : (slope + 1) * levels]
            jumped = change * sum(weights)
            belief += [
                (1 - change) * weight + jumped * prior for weight, prior in zip(weights, self._prior, strict=True)
            ]
        return belief

    def _with_factors(self) -> list[list[float]]:
        """Chances of each kind at each slope and level, times what was learned of the kind: as `_chances`."""
        learned, neighbour = [], 1.0
        # What all kinds have in common is the level's to follow.
        common = (sum(self._accepted) + self._shrinkage) / (sum(self._expected) + self._shrinkage)
        for accepted, expected, chances in zip(self._accepted, self._expected, self._chances, strict=True):
            # Half way back to 1, so that the first kinds' noise is not carried to the last.
            near = (1 + neighbour) / 2
            neighbour = (accepted + self._shrinkage * near) / (expected * common + self._shrinkage)
            learned.append([min(_MOST, neighbour * chance) for chance in chances])
        return learned


def _logistic(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))
