"""Which of several ways is the fastest here: measured once per machine and shape, and remembered. Knows times and
names; nothing of what is timed."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping

import mlx.core as mx

from mlx_spec.remembered import Remembered

Trial = Callable[[int], mx.array]
"""Builds so many calls, each of which needs the result of the one before, and gives the last result."""
Measure = Callable[[Mapping[str, Trial]], dict[str, float]]
_SECTION = "milliseconds"
_SAMPLES = 5
_SAMPLE_SECONDS = 2e-3
"""Long against the start of a computation and the reading of a clock."""
_MOST_CALLS = 32
_logger = logging.getLogger("mlx_spec")


def measure(trials: Mapping[str, Trial]) -> dict[str, float]:
    """Milliseconds per call of each trial: medians, the trials taking turns. One that fails is left out."""
    calls: dict[str, int] = {}
    for name, trial in trials.items():
        try:
            _seconds(trial, 1)  # compiles what it needs
            calls[name] = max(1, min(_MOST_CALLS, int(_SAMPLE_SECONDS / max(_seconds(trial, 1), 1e-9))))
        except (RuntimeError, MemoryError) as error:
            _logger.info("cannot time %s: %s", name, error)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_SAMPLES):
        for name, count in calls.items():
            samples[name].append(_seconds(trials[name], count) / count)
    return {name: 1e3 * statistics.median(times) for name, times in samples.items()}


def _seconds(trial: Trial, calls: int) -> float:
    result = trial(calls)
    mx.synchronize()
    started = time.perf_counter()
    mx.eval(result)
    mx.synchronize()
    return time.perf_counter() - started


class Choice:
    """The times of every way that was ever timed, by shape."""

    def __init__(self, memory: Remembered, measure: Measure = measure) -> None:
        self._memory, self._measure = memory, measure
        self._lock = threading.Lock()
        self._failed: set[tuple[str, str]] = set()

    def fastest(self, shape: str, trials: Callable[[], Mapping[str, Trial]], ways: tuple[str, ...]) -> str:
        """The fastest of `ways`, of which the last is taken where none can be timed. `trials` makes them ready."""
        if len(ways) == 1:
            return ways[0]
        times = self.milliseconds(shape, trials, ways)
        return min(ways, key=lambda way: times.get(way, float("inf"))) if times else ways[-1]

    def milliseconds(
        self, shape: str, trials: Callable[[], Mapping[str, Trial]], ways: tuple[str, ...], *, again: bool = False
    ) -> dict[str, float]:
        """Per call of each way; those that cannot run are left out. `again`: whatever is remembered."""
        with self._lock:
            known = {} if again else _times(self._memory.get(_SECTION, shape))
            missing = [way for way in ways if way not in known and (again or (shape, way) not in self._failed)]
            if missing:
                # Against each other, not against those of another day.
                known |= self._measure({way: trial for way, trial in trials().items() if way in ways})
                self._failed |= {(shape, way) for way in ways if way not in known}
                self._memory.set(_SECTION, shape, known)
            return {way: known[way] for way in ways if way in known}


def _times(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {way: float(time) for way, time in value.items() if isinstance(time, int | float) and time > 0}
