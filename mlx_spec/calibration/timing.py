"""What passes cost here: times those of a target and its draft the way the engine runs them. Knows contexts and the
clock; nothing of who asks, nor of what is remembered."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter

import mlx.core as mx

from mlx_spec.architectures.context import Context
from mlx_spec.calibration.record import ROWS, SLOW_SECONDS, Calibration
from mlx_spec.decoding.sampling import distribution, draw
from mlx_spec.decoding.verification import verify_block
from mlx_spec.errors import MLXSpecError
from mlx_spec.machine.memory import available_memory
from mlx_spec.settings import Sampling

Announce = Callable[[str], None]
"""Told what is timed next."""

ROOM = 32
"""Positions beyond its text that a context is taken to at most: those of the pass in which a draft catches up."""
_NEEDED = (1, 2, 4, 8, 16)
_TELLING = (1, 2, 4, 8, 3, 6, 16, 12, 5, 10, 14, 7, 9, 11, 13, 15)
"""Rows, those first that say most about the others."""
_CHAIN = 4
"""Passes that follow one another in one sample, at most."""
_SAMPLES = 5
GREEDY = Sampling()
_FAILURES = (RuntimeError, MemoryError, MLXSpecError)
"""How a pass ends for which there is no memory."""


def filters_of(sampling: Sampling) -> Sampling:
    """What of it the cost of a pass depends on: whether a token is drawn, and which filters go over the vocabulary."""
    if sampling.temperature == 0:
        return GREEDY
    return Sampling(temperature=1.0, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)


def active_filters(sampling: Sampling) -> dict[str, float]:
    """Those of `filters_of` that leave tokens out, by their names."""
    measured = filters_of(sampling)
    values = {name: getattr(measured, name) for name in ("top_k", "top_p", "min_p")}
    return {name: value for name, value in values.items() if value != getattr(GREEDY, name)}


def measure(
    target: Context,
    draft: Context | None,
    *,
    sampling: Sampling = GREEDY,
    rows: Iterable[int] = ROWS,
    budget_seconds: float,
    progress: Announce | None = None,
) -> Calibration:
    """Time passes of contexts that hold a text, and leave the contexts as they were, however this ends.

    sampling: see `filters_of`. rows: of the target's passes. Once `budget_seconds` are used up, what has not been
    timed is left out, but never what lets a schedule go as far as it can: 1, 2, 4, 8 and 16 rows, the draft's step and
    its catching up. Passes for which there is no memory are left out too, except the one over a single row. The
    contexts reach up to `ROOM` positions beyond their text.
    Raises ValueError for a context that cannot be rewound.
    """
    if not all(context.can_rewind for context in (target, draft) if context is not None):
        raise ValueError("only a context that can be rewound can be measured")
    watch = _Stopwatch(budget_seconds, progress)
    passes = _Passes(target, sampling)
    one = _Timed("1 row", target, lambda: passes.plain(1), 1)
    # A sample of several passes takes no more than a fraction of the budget.
    affordable = budget_seconds / 8
    seconds = watch.sample(one)  # compiles what it needs
    if seconds > min(SLOW_SECONDS, affordable / _CHAIN):
        seconds = watch.sample(one)
    slow = seconds >= SLOW_SECONDS
    chained = max(1, min(_CHAIN, int(affordable / seconds)))
    if slow:
        watch.note(one, seconds)
    else:
        watch.first(_Timed("1 row", target, lambda: passes.plain(chained), chained), math.inf)

    wanted = [count for count in _in_telling_order(rows) if 1 < count <= ROOM]
    needed = [passes.verifying(count) for count in wanted if count in _NEEDED]
    if draft is not None:
        drafting = _Passes(draft, sampling)
        steps = max(2, chained)
        needed.append(_Timed("draft, synchronised", draft, lambda: drafting.chain(steps, lazily=False), steps))
        if _has_memory_for_chains(draft):
            needed.append(_Timed("draft, lazily", draft, lambda: drafting.chain(steps, lazily=True), steps))
        # Many rows: with few the difference drowns in the noise.
        needed.append(_Timed("draft, catching up", draft, drafting.catch_up, 1, ROOM))
    for timed in needed:
        # A slow pass that took no longer than its rows one by one was not held up by compiling.
        watch.first(timed, timed.rows * seconds if slow else 0.0)
    for count in wanted:
        # Per row half a pass over one: more than on any machine known, except for the first few rows.
        if count not in _NEEDED and watch.allows(seconds * max(1, count / 2)):
            watch.first(passes.verifying(count), count * seconds if slow else 0.0)
    if slow:
        for timed in (one, *(timed for timed in needed if timed.rows <= 4)):
            watch.again(timed)  # what disturbs one sample hardly disturbs the other
    watch.repeat()
    times = watch.medians()
    one_step, many = times.get("draft, synchronised"), times.get("draft, catching up")
    measured = [(1, times["1 row"]), *((count, times.get(f"{count} rows")) for count in sorted(wanted))]
    return Calibration(
        context_length=target.length,
        target=tuple((count, seconds) for count, seconds in measured if seconds is not None),
        draft_lazily=times.get("draft, lazily") if one_step is not None else None,
        draft_synchronised=one_step,
        draft_row=None if many is None or one_step is None else max(0.0, many - one_step) / (ROOM - 1),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _in_telling_order(rows: Iterable[int]) -> list[int]:
    return sorted(set(rows), key=lambda count: (_TELLING.index(count) if count in _TELLING else len(_TELLING), count))


def _has_memory_for_chains(context: Context) -> bool:
    """Whether each pass of a lazy chain may copy the cache, as it does where it is too large to be chained on."""
    available = available_memory()
    return context.chains_cheaply or available is None or (_CHAIN + 1) * context.nbytes < available


@dataclass(frozen=True)
class _Timed:
    """Something to time: `passes` passes of `context` over `rows` rows."""

    name: str
    context: Context
    run: Callable[[], object]
    passes: int
    rows: int = 1


class _Passes:
    """A context's passes as the engine runs them: from token ids to ids on the host."""

    def __init__(self, context: Context, sampling: Sampling) -> None:
        self._context, self._columns = context, context.vocabulary_size
        self._sampling = filters_of(sampling)
        # Spread over the vocabulary: rows of one token would all go to the same experts of a mixture.
        self._tokens = mx.array([(index * 7919 + 13) % self._columns for index in range(ROOM)], mx.int32)
        self._key = mx.random.key(0)
        mx.eval(self._tokens, self._key)

    def plain(self, steps: int) -> None:
        """Plain decoding: the next pass is in flight while a token is read, where that is allowed."""
        token, unread = self._tokens[:1], None
        for _ in range(steps):
            token = self._next(self._context.extend(token))
            mx.async_eval(token)
            if unread is not None:
                unread.item()
            unread = token if self._context.chains_cheaply else None
            if unread is None:
                token.item()
        token.item()

    def verifying(self, rows: int) -> _Timed:
        """A pass over the newest token and drafts, and how many of these are accepted."""
        tokens = self._tokens[:rows]

        def verify() -> None:
            logits = self._context.extend(tokens)
            target = distribution(logits, self._sampling, self._columns)  # (rows, vocabulary_size)
            mx.eval(verify_block(target, target[:-1], tokens[1:], self._key))

        return _Timed(f"{rows} rows", self._context, verify, 1, rows)

    def chain(self, steps: int, *, lazily: bool) -> None:
        """Tokens drafted one after the other."""
        token = self._tokens[:1]
        for _ in range(steps):
            token = self._next(self._context.extend(token, rows=1))
            if lazily:
                mx.async_eval(token)
            else:
                mx.eval(token)
        mx.eval(token)

    def catch_up(self) -> None:
        """A drafted token after many that were committed without this model."""
        mx.eval(self._next(self._context.extend(self._tokens, rows=1)))

    def _next(self, logits: mx.array) -> mx.array:
        return draw(distribution(logits, self._sampling, self._columns), self._key)


class _Stopwatch:
    """Samples of passes, within a budget."""

    def __init__(self, budget_seconds: float, progress: Announce | None) -> None:
        self._deadline = perf_counter() + budget_seconds
        self._progress = progress
        self._samples: dict[_Timed, list[float]] = {}

    def sample(self, timed: _Timed) -> float:
        """Seconds per pass. Its context is left as it was."""
        if self._progress is not None:
            self._progress(timed.name)
        context, length = timed.context, timed.context.length
        mx.synchronize()
        started = perf_counter()
        try:
            timed.run()
            mx.synchronize()
            return (perf_counter() - started) / timed.passes
        finally:
            context.rewind(length)
            if length > 0:
                context.evaluate()  # nothing lazy stays behind, which would belong to this thread

    def note(self, timed: _Timed, seconds: float) -> None:
        self._samples.setdefault(timed, []).append(seconds)

    def first(self, timed: _Timed, believable: float) -> None:
        """The first sample, after a run that compiles what it needs; that run itself where it took no more than
        `believable` seconds a pass or there is no time for another. One that fails is left out, unless it is the first
        of all."""
        try:
            seconds = self.sample(timed)
            if seconds > believable and (self.allows(seconds * timed.passes) or not self._samples):
                seconds = self.sample(timed)
        except _FAILURES:
            if not self._samples:
                raise
            return
        self.note(timed, seconds)

    def again(self, timed: _Timed) -> None:
        """One more sample, whatever the budget."""
        with contextlib.suppress(*_FAILURES):
            self.note(timed, self.sample(timed))

    def allows(self, seconds: float) -> bool:
        """Whether so many more seconds are within the budget."""
        return perf_counter() + seconds <= self._deadline

    def repeat(self) -> None:
        """More samples as far as there is time, the passes taking turns: a machine's speed drifts."""
        for _ in range(_SAMPLES - 1):
            for timed, seconds in list(self._samples.items()):
                if self.allows(seconds[-1] * timed.passes):
                    try:
                        self.note(timed, self.sample(timed))
                    except _FAILURES:
                        return

    def medians(self) -> dict[str, float]:
        # Of two, the lower: a disturbance only ever makes it longer.
        return {timed.name: statistics.median_low(seconds) for timed, seconds in self._samples.items()}
