"""What was measured of a pair's passes, and how it is kept. Plain figures; nothing is measured here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from mlx_spec.decoding.schedule.costs import Costs

ROWS = tuple(range(1, 17))
"""Of target passes: as many as are measured at most."""
SLOW_SECONDS = 0.5
"""A pass that takes so long is not warmed up: what is compiled at its first run is little of it."""
_CLEARLY = 0.95
_DOUBTFUL = 1.5
_LONGEST = 1e9


@dataclass(frozen=True)
class Calibration:
    """Seconds of passes after a text of `context_length` tokens, each a median."""

    context_length: int
    target: tuple[tuple[int, float], ...]
    """(rows, seconds), rows ascending from 1. One row is plain decoding, with its next pass in flight."""
    draft_lazily: float | None
    """A draft step where each is built on the one before in flight; None if not measured."""
    draft_synchronised: float | None
    """A draft step where each token is waited for; None without a draft model."""
    draft_row: float | None
    """One more row in a draft pass of many; None if not measured."""
    measured_at: str
    """ISO 8601."""

    @property
    def chains_lazily(self) -> bool:
        """Whether draft steps are clearly faster without a synchronisation after each. Where they are not, reading
        every token costs nothing and tells when to stop."""
        if self.draft_lazily is None or self.draft_synchronised is None:
            return False
        return self.draft_lazily < _CLEARLY * self.draft_synchronised

    @property
    def draft_step(self) -> float | None:
        """A draft step the way it is run here; None without a draft model."""
        return self.draft_lazily if self.chains_lazily else self.draft_synchronised

    @property
    def disturbed(self) -> bool:
        """Whether something else must have run meanwhile: rows in one pass cannot take longer than one by one, nor can
        more rows take less time than fewer. Asked of slow passes, which are timed once; others are medians."""
        one = self.target[0][1]
        times = [seconds for _, seconds in self.target]
        slower = any(seconds > _DOUBTFUL * rows * one for rows, seconds in self.target)
        falling = any(fewer > _DOUBTFUL * more for fewer, more in pairwise(times))
        return max(times) >= SLOW_SECONDS and (slower or falling)

    def costs(self) -> Costs:
        """For a schedule. A row that was not measured is taken to cost a step: it never costs more."""
        step = self.draft_step
        row = self.draft_row if self.draft_row is not None else step or 0.0
        return Costs(self.target, step, row, self.chains_lazily)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Calibration | None:
        """What `as_dict` gave, however it was kept meanwhile; None for anything else."""
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(value, dict) or sorted(value) != sorted(names):
            return None
        try:
            target = tuple((_whole(rows, 1, ROWS[-1]), _seconds(seconds)) for rows, seconds in value["target"])
            lazily, synchronised, row = (
                None if value[name] is None else _seconds(value[name], or_none_at_all=name == "draft_row")
                for name in ("draft_lazily", "draft_synchronised", "draft_row")
            )
            length, moment = _whole(value["context_length"], 0, 2**40), value["measured_at"]
            datetime.fromisoformat(moment)
            calibration = cls(length, target, lazily, synchronised, row, moment)
            calibration.costs()
        except (ValueError, TypeError):
            return None
        return calibration if synchronised is not None or (lazily is None and row is None) else None


def _whole(value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(value)
    return value


def _seconds(value: Any, or_none_at_all: bool = False) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LONGEST:
        raise ValueError(value)
    if value == 0 and not or_none_at_all:
        raise ValueError(value)
    return float(value)
