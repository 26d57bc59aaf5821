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
    """Seconds of the passes a round is made of, and the same relative to plain decoding. What is not known yet is not
    in it, which may be all.

    target: (rows, seconds) of a target pass, rows ascending from 1. Between two measured counts the time is taken to
    grow evenly, and beyond the last nothing is known: `verify` is infinite there, so nothing goes there.
    draft_step: one drafted token, the way drafts are chained here; None without a draft model, or where not known.
    draft_row: one more committed token in a draft pass over many, which is how the draft catches up.
    draft_chained: whether each draft step is built on the one before in flight, so that no token is waited for.
    Raises ValueError for a table that cannot have been measured.
    """

    target: tuple[tuple[int, float], ...]
    draft_step: float | None
    draft_row: float = 0.0
    draft_chained: bool = False

    def __post_init__(self) -> None:
        if self.target and self.target[0][0] != 1:
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
        """The largest pass whose cost is known; 0 where none is."""
        return self.target[-1][0] if self.target else 0

    @property
    def plain(self) -> float:
        """Seconds of plain decoding's pass; infinite where not known."""
        return self._seconds[0] if self.target else math.inf

    @property
    def draft(self) -> float:
        """c: one drafted token in passes of plain decoding; infinite where not known."""
        return math.inf if self.draft_step is None or not self.target else self.draft_step / self.plain

    @property
    def catching_up(self) -> float:
        """One committed token the draft has to read first, in passes of plain decoding."""
        return self.draft_row / self.plain

    def verify(self, rows: int) -> float:
        """V(rows), which never falls as rows grow; infinite beyond the last measured."""
        if rows < 1:
            raise ValueError(f"a target pass has at least one row, not {rows}")
        if rows > self.most_rows:
            return 1.0 if rows == 1 else math.inf
        return self._seconds[rows - 1] / self._seconds[0]

    def speedups(self, reach: Sequence[float], step: float, row: float = 0.0, lag: int = 0) -> list[float]:
        """Tokens for the time of a plain pass, of rounds that draft 1, 2, ... tokens; plain decoding has 1.

        reach: the chances that the first, the first two, ... of them are all accepted: a, a^2, ... at acceptance a.
        K of them emit 1 + reach[0] + ... + reach[K - 1] tokens, in V(K + 1) + K c (Leviathan et al. 2023, theorem 3.8,
        where verifying was free and chances did not differ by position).
        step: c of who drafts, in passes of plain decoding; row: what a token costs that it has to read first; lag: how
        many those are, a debt that is paid over the tokens to come.
        """
        speedups, emitted = [], 1.0
        for drafted, chance in enumerate(reach, start=1):
            emitted += chance
            # A draft that is accepted whole leaves its last token to be read next time.
            read = chance + lag * emitted / _REPAID_OVER
            speedups.append(emitted / (self.verify(drafted + 1) + drafted * step + read * row))
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
