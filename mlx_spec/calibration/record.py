"""What is known of the costs of passes, and how it is kept. Plain figures; nothing is measured here."""

from __future__ import annotations

import functools
import logging
import math
import statistics
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.machine.remembered import Remembered

ROWS = tuple(range(1, 17))
"""Of target passes: as many as are measured at most."""
SLOW_SECONDS = 0.5
"""A pass that takes so long is not warmed up: what is compiled at its first run is little of it."""
LEAST_SECONDS = 1e-7
"""What is kept where something took no time that could be measured."""
_SECTION = "passes"
_CLEARLY = 0.95
_LEAST, _ENOUGH = 2, 5
"""Samples from which on a figure is known, and is settled."""
_ANOTHER = 1.5
_FOLLOWING = 1 / 32
_NOTICEABLY = 0.02
_LONGEST = 1e9
_logger = logging.getLogger("mlx_spec")
_Sample = tuple[str, float | None, bool]


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

    def costs(self) -> Costs:
        """For a schedule. A row that was not measured is taken to cost a step: it never costs more."""
        step = self.draft_step
        row = self.draft_row if self.draft_row is not None else step or 0.0
        return Costs(self.target, step, row, self.chains_lazily)


@dataclass
class _Figure:
    """Seconds by samples: the median of the first few, the lower of two as a disturbance only ever makes it longer;
    from then on it follows slowly those that agree with it within a factor of `_ANOTHER`; none, if measured thoroughly.
    """

    settled: float | None = None
    samples: list[float] = field(default_factory=list)
    """The first ones; later the latest, if they did not agree and were all longer or all shorter."""
    thorough: bool = False
    told: float = math.inf
    agreed: tuple[int, int] = (0, 0)
    off_since: int = 0
    """When two samples last agreed, and when the first of the latest did not: in agreements of the whole table."""

    @property
    def seconds(self) -> float | None:
        if self.settled is None and len(self.samples) >= _LEAST:
            return statistics.median_low(self.samples)
        return self.settled

    def agrees(self, sample: float) -> bool:
        """Take a sample; whether it is like those before."""
        if self.settled is None:
            self.samples.append(sample)
            if len(self.samples) == _ENOUGH:
                self.settled, self.samples = statistics.median_low(self.samples), []
        elif self.settled / _ANOTHER <= sample <= self.settled * _ANOTHER:
            self.samples = []
            if not self.thorough:
                self.settled += (sample - self.settled) * _FOLLOWING
        else:
            alike = all((other > self.settled) == (sample > self.settled) for other in self.samples)
            self.samples = [*self.samples, sample] if alike else [sample]
            return False
        return True

    def scale(self, factor: float) -> None:
        """It was taken at another speed."""
        if self.settled is None:
            self.samples = [sample * factor for sample in self.samples]
        else:
            self.settled, self.samples, self.thorough = self.settled * factor, [], False


class Table:
    """Figures in seconds by name. One without enough samples is not known.

    Where `_ENOUGH` samples in a row are off their figure in one direction by more than a factor of `_ANOTHER`, the
    machine has become another: the figure, and all that have not agreed with samples meanwhile (two, as one may be
    disturbed), are scaled to what these say. So the proportions of a table outlive a change of speed.
    """

    def __init__(self) -> None:
        self._figures: dict[str, _Figure] = {}
        self._agreements = 0

    def known(self) -> dict[str, float]:
        """What is known, by name."""
        times = [(name, figure.seconds) for name, figure in list(self._figures.items())]  # others may add meanwhile
        return {name: seconds for name, seconds in times if seconds is not None}

    def get(self, name: str) -> float | None:
        """None where not known."""
        figure = self._figures.get(name)
        return None if figure is None else figure.seconds

    def observe(self, name: str, sample: float | None, *, thorough: bool = False) -> bool:
        """Whether a figure is noticeably another now. thorough: `sample` is itself a figure of several, and with None
        there is none."""
        if sample is None:
            return self._figures.pop(name, None) is not None
        if not 0 < sample < _LONGEST:
            return False
        figure = self._figures.setdefault(name, _Figure())
        if thorough:
            figure = self._figures[name] = _Figure(sample, thorough=True)
        if thorough or figure.agrees(sample):
            self._agreements += 1
            figure.agreed = figure.agreed[1], self._agreements
        else:
            if len(figure.samples) == 1:
                figure.off_since = self._agreements
            if figure.settled is None or len(figure.samples) < _ENOUGH:
                return False
            factor = statistics.median_low(figure.samples) / figure.settled
            for other in self._figures.values():
                if other.agreed[0] <= figure.off_since:
                    other.scale(factor)
        seconds = figure.seconds
        if seconds is None or abs(seconds - figure.told) <= _NOTICEABLY * seconds:
            return False
        figure.told = seconds
        return True

    def as_json(self) -> list[Any]:
        """`from_json` reads it."""
        return [[name, each.settled, each.thorough, each.samples] for name, each in self._figures.items()]

    @classmethod
    def from_json(cls, value: Any) -> Table | None:
        """What `as_json` gave, however it was kept meanwhile; None for anything else."""
        table = cls()
        try:
            for name, settled, thorough, samples in value:
                figure = _Figure(None if settled is None else _seconds(settled), [*map(_seconds, samples)], thorough)
                young = settled is None and not thorough and samples
                if not isinstance(name, str) or name in table._figures or not isinstance(thorough, bool):
                    return None
                if not (young or settled is not None) or len(samples) >= _ENOUGH:
                    return None
                figure.told = figure.seconds or math.inf
                table._figures[name] = figure
        except (ValueError, TypeError):
            return None
        return table if table._figures else None


def _seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _LONGEST:
        raise ValueError(value)
    return float(value)


class Store:
    """Tables by key, among what is remembered of this machine. Unusable ones count as unknown, which is said once."""

    def __init__(self, memory: Remembered) -> None:
        self._memory = memory
        self._told = False
        self._lock = threading.Lock()
        self._tables: dict[str, Table] = {}
        self._new: dict[str, list[_Sample]] = {}
        self._changed = False
        self._ran: set[Hashable] = set()
        self._writers: list[threading.Thread] = []

    def get(self, key: str) -> Table:
        """What is known by now; a table that others add to."""
        if key not in self._tables:
            self._tables[key] = self._read(self._memory.get(_SECTION, key))
        return self._tables[key]

    def observe(self, key: str, name: str, seconds: float | None, *, thorough: bool = False) -> bool:
        """See `Table.observe`."""
        with self._lock:
            changed = self.get(key).observe(name, seconds, thorough=thorough)
            self._new.setdefault(key, []).append((name, seconds, thorough))
            self._changed |= changed or self.get(key).get(name) is None
            return changed

    def ran(self, what: Hashable) -> bool:
        """Whether this process has run it before: the first time, it is compiled."""
        ran = what in self._ran
        self._ran.add(what)
        return ran

    def write(self) -> None:
        """Have a thread add what was observed to the file, if it changed anything: a disk may be slow."""
        with self._lock:
            new, self._new = self._new, {}
            changed, self._changed = self._changed, False
        if changed:
            self._writers = [writer for writer in self._writers if writer.is_alive()]
            writer = threading.Thread(target=self._write, args=(new,), name="mlx-spec remembers")
            try:
                writer.start()
                self._writers.append(writer)
            except RuntimeError:  # the process is about to end
                self._write(new)

    def wait(self) -> None:
        """Until all is written."""
        for writer in self._writers:
            writer.join()

    def _write(self, new: dict[str, list[_Sample]]) -> None:
        def add(samples: list[_Sample], value: Any) -> Any:
            # To what is there by now: another process may have measured thoroughly.
            table = self._read(value)
            for name, seconds, thorough in samples:
                table.observe(name, seconds, thorough=thorough)
            return table.as_json() or None

        self._memory.update(_SECTION, {key: functools.partial(add, samples) for key, samples in new.items()})
        if self._memory.damage is not None:
            self._tell(self._memory.damage)

    def _read(self, value: Any) -> Table:
        table = Table.from_json(value)
        if self._memory.damage is not None:
            self._tell(self._memory.damage)
        elif value is not None and table is None:
            self._tell("what is remembered of a pass's cost is unusable")
        return table or Table()

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            _logger.warning("%s: what passes cost on this machine is measured again", what)
