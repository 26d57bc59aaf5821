"""The seam between rounds, whose times are the samples, and who learns from them what passes cost. Knows times and
counts; neither measures nor remembers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mlx_spec.decoding.schedule.costs import Costs


@dataclass(frozen=True)
class RoundTime:
    """How long one round took, the caller's time between rounds left out."""

    rows: int
    """Of the target's pass: 1 of a plain round, else drafted + 1."""
    seconds: float
    """Of the whole round: from its dispatch, or from the end of the round before where it was in flight by then, until
    its tokens were read."""
    drafter: str | None
    """Who drafted; None in a plain round."""
    read: int
    """Committed tokens that a draft model read first, beyond the newest."""
    draft_seconds: float | None
    """The part of `seconds` that drafting took: 0 where it took no pass, None where its tokens were not waited for."""


class CostLearner(Protocol):
    """Knows what passes cost under one request's settings, and learns more from its rounds."""

    def costs(self, length: int) -> Costs:
        """What is known for contexts of about `length` tokens; what is not known is not in it."""

    def observe(self, length: int, took: RoundTime) -> bool:
        """Learn from a round of a context of `length` tokens. Whether `costs` says something else now."""

    def close(self) -> None:
        """The request has ended: what was learned is remembered."""
