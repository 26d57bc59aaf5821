"""How far a generation has come: prompt tokens read, and what its rounds add up to. Only counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mlx_spec.decoding.engine import Round
from mlx_spec.llm.statistics import Drafted

Progress = Callable[[int, int], None]
"""Told (done, total)."""


def counted(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    """What turns 'so many more' into 'done of total' for `progress`, which is told at once that nothing is done."""
    if progress is None:
        return None
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    progress(0, total)
    return advance


class RoundTotals:
    """Sums over rounds."""

    def __init__(self) -> None:
        self.tokens = self.passes = self.parked = 0
        self.by_drafter: dict[str, Drafted] = {}
        self.passes_by_draft_tokens: Counter[int] = Counter()
        self._reached: Counter[int] = Counter()  # by position of a drafted token
        self._accepted: Counter[int] = Counter()

    def add(self, finished: Round) -> None:
        drafted, accepted = finished.drafted, finished.accepted
        self.tokens += len(finished.tokens)
        self.passes += 1
        self.parked += finished.parked
        self.passes_by_draft_tokens[drafted] += 1
        self._reached.update(range(min(accepted + 1, drafted)))
        self._accepted.update(range(accepted))
        if finished.drafter is not None:
            before = self.by_drafter.get(finished.drafter, Drafted(0, 0, 0))
            self.by_drafter[finished.drafter] = Drafted(
                before.passes + 1, before.drafted + drafted, before.accepted + accepted
            )

    @property
    def drafted(self) -> int:
        return sum(part.drafted for part in self.by_drafter.values())

    @property
    def accepted(self) -> int:
        return sum(part.accepted for part in self.by_drafter.values())

    @property
    def accepted_by_position(self) -> list[tuple[int, int]]:
        """See `Statistics.accepted_by_position`."""
        return [(self._reached[position], self._accepted[position]) for position in sorted(self._reached)]
