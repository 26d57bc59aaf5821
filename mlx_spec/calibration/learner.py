"""What passes cost, learned from the rounds of an answer. Knows their times and the record; runs no pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from mlx_spec.calibration.filters import Filters
from mlx_spec.calibration.record import LEAST_SECONDS, ROWS, SLOW_SECONDS, Calibration, Store
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.learning import RoundTime

_MANY_READ = 8
_SHARE = 0.02
"""Of an answer's time, for timing its filters as long as their cost is not known."""


def rows_name(rows: int) -> str:
    """Of a target pass's figure in a `Table`, taken greedily."""
    return f"{rows} rows"


def draft_names(draft: str) -> tuple[str, str, str]:
    """Of a draft's figures: a step chained lazily, one synchronised, a row more."""
    return f"{draft}: lazily", f"{draft}: synchronised", f"{draft}: row"


class Learner:
    """A `CostLearner` of one request.

    Of a length, passes over more rows than are known, and a draft whose steps are not, are guessed from what is known
    of the next shorter and longer texts, at the proportions they have there.
    """

    def __init__(
        self, store: Store, keys: Callable[[int], Sequence[str]], filters: Filters, draft: str | None
    ) -> None:
        """keys: of the tables for a length, those for neighbouring lengths behind its own. draft: as in its names."""
        self._store, self._keys, self._filters = store, keys, filters
        self._draft = None if draft is None else draft_names(draft)
        self._waiting: list[tuple[str, RoundTime]] = []
        """By key: until it is known what of them the filters took."""
        self._seconds = self._timing = 0.0
        self._delayed = False

    def costs(self, length: int) -> Costs:
        own, *others = (self._store.get(key).known() for key in self._keys(length))
        rows, draft = _parts(own)
        for other in others:
            rows_there, draft_there = _parts(other)
            shared = max(rows.keys() & rows_there.keys(), default=0)
            scale = rows[shared] / rows_there[shared] if shared else 1.0
            # Beyond what is known alone: a guess below it would say something of what was measured.
            rows |= {count: seconds * scale for count, seconds in rows_there.items() if count > max(rows, default=0)}
            scale = rows[1] / rows_there[1] if 1 in rows and 1 in rows_there else 1.0
            draft = {name: seconds * scale for name, seconds in draft_there.items()} | draft
        lazily, synchronised, row = map(draft.get, self._draft or ("", "", ""))
        drawn = self._filters.seconds(1) or 0.0
        target = [(count, rows[count] + (self._filters.seconds(count) or 0.0)) for count in sorted(rows) if 1 in rows]
        step, chained = (None if each is None else each + drawn for each in (synchronised, lazily))
        return Calibration(length, tuple(target), chained, step, row, "").costs()

    def observe(self, length: int, took: RoundTime) -> bool:
        if self._delayed:  # it was in flight while a call was timed
            self._delayed = False
            return False
        self._seconds += took.seconds
        key = self._keys(length)[0]
        if self._filters.seconds(1) is not None:
            return self._learn(key, took)
        self._waiting.append((key, took))
        if self._timing > _SHARE * self._seconds:
            return False
        started = perf_counter()
        try:
            self._filters.sample()
            self._timing += perf_counter() - started
        except (RuntimeError, MemoryError):  # no memory: an answer is not lost for that
            self._timing = math.inf
        self._delayed = True
        if self._filters.seconds(1) is None:
            return False
        changed = [self._learn(*each) for each in self._waiting]
        self._waiting = []
        return any(changed)

    def close(self) -> None:
        self._store.write()

    def _learn(self, key: str, took: RoundTime) -> bool:
        one = self._store.get(key).get(rows_name(1))
        changed = False
        for name, seconds in self._samples(key, took):
            believable = 0.0 if one is None else took.rows * one
            if self._store.ran((key, name, self._filters.key)) or SLOW_SECONDS <= seconds <= believable:
                changed |= self._store.observe(key, name, seconds)
        return changed

    def _samples(self, key: str, took: RoundTime) -> Iterator[tuple[str, float]]:
        """Of figures, by their names."""
        known, name, drafted = self._store.get(key), rows_name(took.rows), took.rows - 1
        verifying = took.seconds - (self._filters.seconds(took.rows) or 0.0)
        drawing = drafted * (self._filters.seconds(1) or 0.0)
        if took.drafter is None or took.draft_seconds == 0:
            yield name, verifying
        elif self._draft is None:
            return
        elif took.draft_seconds is not None:
            _, synchronised, row = self._draft
            yield name, verifying - took.draft_seconds
            steps, step = took.draft_seconds - drawing, known.get(synchronised)
            if took.read <= 1:
                yield synchronised, steps / drafted
            elif took.read >= _MANY_READ and step is not None:
                yield row, max(LEAST_SECONDS, (steps - drafted * step) / took.read)
        else:
            # Nothing says where the one ended and the other began: what is known better is taken for known.
            lazily, _, row = self._draft
            both = verifying - drawing - took.read * (known.get(row) or 0.0)
            step, verified = known.get(lazily), known.get(name)
            if step is not None:
                yield name, both - drafted * step
            elif verified is not None:
                yield lazily, (both - verified) / drafted


def _parts(known: dict[str, float]) -> tuple[dict[int, float], dict[str, float]]:
    """What is known of the target's passes, by rows, and of drafts."""
    rows = {count: known[rows_name(count)] for count in ROWS if rows_name(count) in known}
    return rows, {name: seconds for name, seconds in known.items() if ":" in name}
