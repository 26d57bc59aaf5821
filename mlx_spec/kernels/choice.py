"""Which of several ways is the fastest here: measured once per machine and shape, and remembered. Knows times and
names; nothing of what is timed."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Mapping

import mlx.core as mx

from mlx_spec.errors import MLXSpecError
from mlx_spec.machine.remembered import Remembered

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
    samples: dict[str, list[float]] = {}

    def sample(name: str, count: int) -> float | None:
        try:
            return _seconds(trials[name], count) / count
        except Exception as error:  # a kernel may fail in any way, which must not be the model's end
            _logger.info("cannot time %s: %s", name, error)
            calls.pop(name, None)
            samples.pop(name, None)
            return None

    for name in trials:
        if sample(name, 1) is None:  # compiles what it needs
            continue
        seconds = sample(name, 1)
        if seconds is not None:
            calls[name], samples[name] = max(1, min(_MOST_CALLS, int(_SAMPLE_SECONDS / max(seconds, 1e-9)))), []
    for _ in range(_SAMPLES):
        for name, count in list(calls.items()):
            seconds = sample(name, count)
            if seconds is not None:
                samples[name].append(seconds)
    return {name: 1e3 * statistics.median(times) for name, times in samples.items()}


def _seconds(trial: Trial, calls: int) -> float:
    """With the time that the host takes to build the calls: at decoding it adds to the GPU's."""
    mx.synchronize()
    started = time.perf_counter()
    mx.eval(trial(calls))
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

    def knows(self, shape: str, ways: tuple[str, ...]) -> bool:
        """Whether `fastest` would answer at once."""
        known = _times(self._memory.get(_SECTION, shape))
        return len(ways) == 1 or all(way in known or (shape, way) in self._failed for way in ways)

    def milliseconds(
        self, shape: str, trials: Callable[[], Mapping[str, Trial]], ways: tuple[str, ...], *, again: bool = False
    ) -> dict[str, float]:
        """Per call of each way; those that cannot run are left out. `again`: whatever is remembered."""
        with self._lock:
            known = {} if again else _times(self._memory.get(_SECTION, shape))
            missing = [way for way in ways if way not in known and (again or (shape, way) not in self._failed)]
            if missing:
                # Against each other, not against those of another day.
                try:
                    known |= self._measure({way: trial for way, trial in trials().items() if way in ways})
                except (RuntimeError, MemoryError, MLXSpecError) as error:  # no memory for what the trials need
                    _logger.info("cannot time %s: %s", shape, error)
                self._failed |= {(shape, way) for way in ways if way not in known}
                self._memory.set(_SECTION, shape, known)
            return {way: known[way] for way in ways if way in known}


def _times(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {way: float(time) for way, time in value.items() if isinstance(time, int | float) and 0 < time < 1e9}
