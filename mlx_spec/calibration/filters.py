"""What drawing tokens costs under one request's settings beyond taking the likeliest. Knows logits of a vocabulary's
size; nothing of models and rounds."""

from __future__ import annotations

from time import perf_counter

import mlx.core as mx

from mlx_spec.calibration.record import LEAST_SECONDS, Store
from mlx_spec.calibration.timing import GREEDY, active_filters, filters_of
from mlx_spec.decoding.sampling import distribution, draw
from mlx_spec.settings import Sampling

_MANY = 4


class Filters:
    """The cost of those of one request, all values of a filter being alike."""

    def __init__(self, store: Store, sampling: Sampling, vocabulary_size: int, where: str) -> None:
        """where: of the machine's devices."""
        self._store, self._sampling, self._columns = store, filters_of(sampling), vocabulary_size
        names = " and ".join(active_filters(sampling)) or "no filter"
        self.key = f"{where}; drawn by {names} from {vocabulary_size} tokens"

    def seconds(self, rows: int) -> float | None:
        """More than rows that are taken greedily; None where not known yet."""
        if self._sampling == GREEDY:
            return 0.0
        table = self._store.get(self.key)
        one, many = table.get(_name(1)), table.get(_name(_MANY))
        if one is None or many is None:
            return None
        return one + (rows - 1) * max(0.0, many - one) / (_MANY - 1)

    def sample(self) -> None:
        """Time a call. What is in flight is waited for."""
        rows = 1 if self._store.get(self.key).get(_name(1)) is None else _MANY
        key = mx.random.key(rows)
        logits = mx.random.normal((rows, self._columns), key=key)  # (rows, vocabulary_size)
        mx.eval(logits)
        mx.synchronize()
        times = []
        for sampling in (GREEDY, self._sampling):
            started = perf_counter()
            mx.eval(draw(distribution(logits, sampling, self._columns), key))
            times.append(perf_counter() - started)
        if self._store.ran((self.key, rows)):
            self._store.observe(self.key, _name(rows), max(times[1] - times[0], LEAST_SECONDS))


def _name(rows: int) -> str:
    return f"{rows} rows"
