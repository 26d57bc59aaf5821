"""How far a generation has come: prompt tokens read, and what its rounds add up to. Only counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_spec.engine import Round

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


@dataclass
class RoundTotals:
    """Sums over rounds."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, finished: Round) -> None:
        self.tokens += len(finished.tokens)
        self.passes += 1
        self.drafted += finished.drafted
        self.accepted += finished.accepted
