"""How likely drafted tokens are to be accepted, learned within one request from what became of earlier ones.

Knows kinds of tokens and outcomes; nothing of what a pass costs, nor of token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Levels, in log-odds, that the acceptance of a request may be at: 0.011 to 0.995.
_LEVELS = np.array([-4.5 + 0.75 * step for step in range(14)])
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
        beta = _logistic(_LEVELS) ** accepted * _logistic(-_LEVELS) ** rejected
        prior = (1 - hopeless) * beta / beta.sum()
        prior[0] += hopeless
        self._prior = np.tile(prior, (len(slopes), 1))  # (slopes, levels), a distribution for each slope
        self._belief = self._prior.ravel() / len(slopes)  # (slopes * levels,)
        shifts = np.multiply.outer(offsets, slopes)  # (kinds, slopes)
        self._chances = _logistic(shifts[:, :, None] + _LEVELS).reshape(len(offsets), -1)  # (kinds, slopes * levels)
        self._learned = np.minimum(_MOST, self._chances)
        self._accepted = [0.0] * len(offsets)
        self._expected = [0.0] * len(offsets)
        self._unseen = 0  # rounds without an outcome that the belief does not know of yet

    def reach(self, kinds: Sequence[int]) -> list[float]:
        """Chances that the first, the first two, ... of tokens of these kinds are all accepted."""
        if not kinds:
            return []
        self._catch_up()
        chances: list[float] = (self._learned[list(kinds)].cumprod(axis=0) @ self._belief).tolist()
        return chances

    def observe(self, kinds: Sequence[int], accepted: int) -> None:
        """Of tokens of these kinds the first `accepted` were accepted; the next, if any, was not."""
        self._catch_up()
        belief = self._jumped(self._change)
        seen = list(kinds[: accepted + 1])
        if not seen:
            self._belief = belief
            return
        likely = self._learned[seen]  # (n, slopes * levels)
        if accepted < len(seen):
            likely[-1] = 1 - likely[-1]
        after = belief * likely.cumprod(axis=0)
        before = np.concatenate([belief[None], after[:-1]])
        expected: list[float] = ((before * self._chances[seen]).sum(axis=1) / before.sum(axis=1)).tolist()
        self._belief = after[-1] / after[-1].sum()
        for index, kind in enumerate(seen):
            self._accepted[kind] += (index < accepted) - self._accepted[kind] / self._memory
            self._expected[kind] += expected[index] - self._expected[kind] / self._memory
        self._learned = np.minimum(_MOST, self._factors()[:, None] * self._chances)

    def rest(self) -> None:
        """A round went by without an outcome."""
        self._unseen += 1

    def _catch_up(self) -> None:
        if self._unseen:
            self._belief = self._jumped(1 - (1 - self._change_unseen) ** self._unseen)
            self._unseen = 0

    def _jumped(self, change: float) -> Any:
        """The belief after the level may have jumped; what a kind means stays."""
        belief = self._belief.reshape(self._prior.shape)
        return ((1 - change) * belief + change * belief.sum(axis=1, keepdims=True) * self._prior).ravel()

    def _factors(self) -> Any:
        """What was learned of each kind, by which its chances at any level are multiplied, (kinds,)."""
        factors, neighbour = [], 1.0
        # What all kinds have in common is the level's to follow.
        common = (sum(self._accepted) + self._shrinkage) / (sum(self._expected) + self._shrinkage)
        for accepted, expected in zip(self._accepted, self._expected, strict=True):
            # Half way back to 1, so that the first kinds' noise is not carried to the last.
            near = (1 + neighbour) / 2
            neighbour = (accepted + self._shrinkage * near) / (expected * common + self._shrinkage)
            factors.append(neighbour)
        return np.array(factors)


def _logistic(log_odds: Any) -> Any:
    return 1 / (1 + np.exp(-log_odds))
