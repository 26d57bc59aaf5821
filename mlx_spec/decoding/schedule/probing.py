"""What may be spent on finding out whether speculation would win by now, and what passes cost. Costs in passes of plain
decoding."""

from __future__ import annotations

import math
import sys


class Allowance:
    """A small share of what was spent, saved up for probes of one drafter.

    A probe that fails makes the share smaller, one that succeeds makes it whole again: in a hopeless text probes come
    at growing intervals, and cost a known part of it at most; where the text has changed, they follow each other.
    """

    _most_share, _least_share, _shrinking = 0.008, 0.002, 1.5
    # So many probes' price can be saved up: after a long good time it should not be spent on a long bad one.
    _saved_probes, _first_probes = 1.5, 0.75

    def __init__(self, price: float) -> None:
        """price: what a probe costs beyond plain decoding, if nothing is accepted."""
        self._most = self._saved_probes * price
        self._saved = self._first_probes * price
        self._share = self._most_share

    def reprice(self, price: float) -> None:
        """Probes have another price from now on."""
        self._most = self._saved_probes * price

    def save(self, cost: float) -> None:
        """A round was run at that cost."""
        self._saved = min(self._most, self._saved + self._share * cost)

    def affords(self, loss: float) -> bool:
        """Whether a probe that is expected to lose so much may be made now."""
        return loss <= self._saved

    def spend(self, loss: float, successful: bool) -> None:
        """A probe lost so much, or gained where that is negative."""
        self._saved = min(self._most, self._saved - loss)
        self._share = self._most_share if successful else max(self._least_share, self._share / self._shrinking)

    def rounds(self, loss: float) -> int:
        """How many plain rounds, of cost 1 each, it takes until such a probe can be afforded."""
        if math.isinf(loss):
            return sys.maxsize
        return max(0, math.ceil((loss - self._saved) / self._share))


class Venture:
    """A small share of the time spent so far, for rounds whose cost is not known. Before one the worst that it could
    lose counts, afterwards what it really lost; what it gained pays for others that lost, and is not saved up."""

    _share = 0.03

    def __init__(self) -> None:
        self._time = self._lost = 0.0

    def save(self, cost: float) -> None:
        """A round was run at that cost."""
        self._time += cost

    def affords(self, loss: float) -> bool:
        """Whether a round that may lose so much is within the share."""
        return self._lost + loss <= self._share * self._time

    def spend(self, loss: float) -> None:
        """A round really lost so much, or gained where that is negative."""
        self._lost = max(0.0, self._lost + loss)

    def rounds(self, loss: float) -> int:
        """How many plain rounds it takes until such a loss is within the share."""
        return max(0, math.ceil((self._lost + loss) / self._share - self._time))
