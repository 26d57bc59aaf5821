"""What passes cost on one machine: the V(M) and c by which a schedule weighs drafts. Numbers only; measures nothing.

V(M) is the time of a target pass over M rows and c that of one drafted token, both relative to a target pass over one
row, which is what plain decoding pays for a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

# Tokens over which it should pay that a draft model catches up.
_REPAID_OVER = 64


@dataclass(frozen=True)
class Costs:
    """Seconds of the passes a round is made of, and the same relative to plain decoding.

    target: (rows, seconds) of a target pass, rows ascending from 1. Between two measured counts the time is taken to
    grow evenly, and beyond the last nothing is known: `verify` is infinite there, so nothing goes there.
    draft_step: one drafted token, the way drafts are chained here; None without a draft model.
    draft_row: one more committed token in a draft pass over many, which is how the draft catches up.
    Raises ValueError for a table that cannot have been measured.
    """

    target: tuple[tuple[int, float], ...]
    draft_step: float | None
    draft_row: float = 0.0

    def __post_init__(self) -> None:
        if not self.target or self.target[0][0] != 1:
            raise ValueError(f"the costs of target passes must begin with one row, not {self.target!r}")
        rows = [rows for rows, _ in self.target]
        if any(later <= earlier for earlier, later in pairwise(rows)):
            raise ValueError(f"the rows of target passes must ascend, not {rows}")
        if not all(0 < seconds < math.inf for _, seconds in self.target):
            raise ValueError(f"a target pass takes a positive, finite time, not {[s for _, s in self.target]}")
        if self.draft_step is not None and not 0 <= self.draft_step < math.inf:
            raise ValueError(f"a draft step takes a finite time, not {self.draft_step}")
        if not 0 <= self.draft_row < math.inf:
            raise ValueError(f"a row of a draft pass takes a finite time, not {self.draft_row}")

    @property
    def most_rows(self) -> int:
        """The largest pass whose cost is known."""
        return self.target[-1][0]

    @property
    def draft(self) -> float:
        """c: one drafted token in passes of plain decoding; infinite without a draft model."""
        return math.inf if self.draft_step is None else self.draft_step / self._seconds[0]

    @property
    def catching_up(self) -> float:
        """One committed token the draft has to read first, in passes of plain decoding."""
        return self.draft_row / self._seconds[0]

    def verify(self, rows: int) -> float:
        """V(rows), which never falls as rows grow; infinite beyond the last measured."""
        if rows < 1:
            raise ValueError(f"a target pass has at least one row, not {rows}")
        return self._seconds[rows - 1] / self._seconds[0] if rows <= self.most_rows else math.inf

    def speedups(self, reach: Sequence[float], *, free: bool = False, lag: int = 0) -> list[float]:
        """Tokens for the time of a plain pass, of rounds that draft 1, 2, ... tokens; plain decoding has 1.

        reach: the chances that the first, the first two, ... of them are all accepted: a, a^2, ... at acceptance a.
        K of them emit 1 + reach[0] + ... + reach[K - 1] tokens, in V(K + 1) + K c (Leviathan et al. 2023, theorem 3.8,
        where verifying was free and chances did not differ by position). free: drafted by lookup, c = 0.
        lag: how many tokens the draft model has to read first, a debt that is paid over the tokens to come.
        """
        speedups, emitted = [], 1.0
        for drafted, chance in enumerate(reach, start=1):
            emitted += chance
            cost = self.verify(drafted + 1)
            if not free:
                # A draft that is accepted whole leaves its last token to be read next time.
                cost += drafted * self.draft + (chance + lag * emitted / _REPAID_OVER) * self.catching_up
            speedups.append(emitted / cost)
        return speedups

    @cached_property
    def _seconds(self) -> list[float]:
        """Of passes over 1, 2, ... rows, up to the last measured."""
        # A measurement is off upwards, when something else ran; so where a larger pass took less, the smaller one
        # takes at most that.
        lowest = list(accumulate((seconds for _, seconds in reversed(self.target)), min))[::-1]
        rows = [rows for rows, _ in self.target]
        seconds = lowest[:1]
        for (before, after), (from_seconds, to_seconds) in zip(pairwise(rows), pairwise(lowest), strict=True):
            step = (to_seconds - from_seconds) / (after - before)
            seconds += [from_seconds + step * more for more in range(1, after - before)] + [to_seconds]
        return seconds
