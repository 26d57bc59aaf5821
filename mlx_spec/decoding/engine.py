"""The round loop: draft, verify, accept, commit. Token ids only: no text, no layers.

**Invariant.** Between rounds, and after the generator is closed at any yield or an exception leaves it, both contexts
hold committed tokens and nothing else: the target all but the last one, which is always the first token of its next
pass; the draft the same, but one fewer after a round that accepted every draft, whose last token it then reads
together with the next one, since a pass of two rows costs less than two passes.

One host synchronisation per round: everything up to the accepted count and the next token is one graph. (A draft whose
cache is too large to chain passes on, or that may stop early, adds one per drafted token.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_spec.architectures.context import Context, prefill
from mlx_spec.decoding.drafting import Drafting, Plan
from mlx_spec.decoding.sampling import count_tokens, distribution, draw, leave_tokens, log_probabilities, round_key
from mlx_spec.errors import MLXSpecError
from mlx_spec.machine.memory import NO_MEMORY, memory_or
from mlx_spec.settings import MOST_DRAFT_TOKENS, Sampling


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities under the target's own distribution, before temperature, filters and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens, best first."""


@dataclass(frozen=True)
class Round:
    """What one target pass gave."""

    tokens: list[int]
    """Committed by this round, 1 to drafted + 1."""
    drafted: int
    accepted: int
    """Drafts the target accepted, before any stop cut the round short."""
    drafter: str | None
    """Who drafted; None in a plain round."""
    parked: bool
    """Whether it was plain because speculation could not win."""
    logprobs: list[TokenLogprobs] | None
    ended: bool
    """Whether an end token, or `keep`, ended the generation."""


@dataclass(frozen=True)
class _Flight:
    """A round that has been dispatched: device arrays only."""

    plan: Plan | None
    parked: bool
    drafted: int  # k
    confidences: tuple[float, ...]
    packed: mx.array  # (k + 4,): whether logits are numbers and leave tokens, accepted count, next token, drafts
    next_token: mx.array  # (1,)
    logprobs: tuple[mx.array, mx.array, mx.array] | None  # of each emitted token, and of the top n: ids, values
    started: float  # by perf_counter
    draft_seconds: float | None


class Decoding:
    """One generation: a target context, perhaps drafters, the committed tokens, and the sampling settings."""

    def __init__(
        self,
        tokens: list[int],
        target: Context,
        drafting: Drafting | None,
        *,
        sampling: Sampling,
        seed: int,
        vocabulary_size: int,
    ) -> None:
        """tokens: the committed sequence, at first the prompt; extended in place. The contexts hold a prefix of it."""
        self.tokens, self.target, self.drafting = tokens, target, drafting
        self._sampling, self._vocabulary_size = sampling, vocabulary_size
        self._seed = seed
        self._end: int | None = None  # committed tokens that the context can hold
        self._seen: mx.array | None = None  # (1, vocabulary_size)

    def prefill(self, progress: Callable[[int], None] | None = None) -> None:
        """Read the prompt, all but its last token, with the target and then with the draft."""
        prefill(self.target, self.tokens, progress)
        if self.drafting is not None:
            self.drafting.prefill(self.tokens, progress)

    def rounds(
        self,
        *,
        limit: int | None,
        room: int | None = None,
        end_tokens: Collection[int] = (),
        keep: Callable[[Sequence[int]], int | None] = lambda tokens: None,
    ) -> Generator[Round, None, None]:
        """Generate until an end token, until `keep` says so, or until `limit` tokens have been committed.

        room: how many more tokens the target's context holds: nothing is drafted past that. Past `limit` a schedule may
        draft, and what is too much is cut.
        keep(tokens) sees each round's tokens, an end token included, and
        returns how many of them to keep if generation ends there, else None.
        Raises MLXSpecError where the target's logits are no numbers, or leave no token under the sampling settings.
        """
        self._end = None if room is None else len(self.tokens) + room
        if self._sampling.penalises:  # anew each time: an interrupted pass may have counted what was never committed
            self._seen = count_tokens(self.tokens, self._vocabulary_size)[None]
        left = limit
        flight: _Flight | None = None
        ended_at = away = 0.0  # when the round before had been read, and how long the caller has kept it since
        try:
            while left is None or left > 0:
                planned = flight is None
                if flight is None:
                    flight = self._dispatch(self._plan(left), None)
                current, flight = flight, None
                if current.plan is None:
                    # At once, since the schedule is asked about the next round while this one is in flight.
                    self._observe(current, 0)
                    if self._may_run_ahead(left, planned):
                        flight = self._dispatch(None, current.next_token)
                waiting_from = perf_counter()
                tokens, accepted, logprobs = self._read(current)
                read_at = perf_counter()
                seconds = read_at - max(current.started, ended_at)
                # Where the caller was away for long, a pass in flight may have ended before it was waited for.
                told = current.started > ended_at or max(seconds / 10 - away, read_at - waiting_from - seconds / 10) > 0
                ended_at = read_at
                if current.plan is not None:
                    self._observe(current, accepted, seconds)
                if told and self.drafting is not None:
                    self.drafting.timed(len(self.tokens), current.plan, current.drafted, seconds, current.draft_seconds)
                counted = flight is not None  # the pass ahead has counted the token already
                kept, ended = _cut(tokens[:left], end_tokens, keep)
                self._commit(kept, counted)
                if flight is None:
                    self._rewind()
                else:
                    self.target.settle(len(self.tokens) - 1)
                if left is not None:
                    left -= len(kept)
                drafter = current.plan.offer.drafter if current.plan is not None else None
                emitted = logprobs and logprobs[: len(kept)]
                away = perf_counter()
                yield Round(kept, current.drafted, accepted, drafter, current.parked, emitted, ended)
                away = perf_counter() - away
                if ended:
                    return
        finally:
            self._rewind()

    def _plan(self, left: int | None) -> Plan | None:
        """What to draft now, while `left` tokens may still be committed: the target always adds one of its own."""
        if self.drafting is None or not self.target.can_rewind:
            return None
        most = MOST_DRAFT_TOKENS
        if left is not None and not self.drafting.schedule.whole_rounds:
            most = min(most, left - 1)
        if self._end is not None:
            most = min(most, self._end - len(self.tokens) - 1)
        return self.drafting.plan(self.tokens, most)

    def _observe(self, flight: _Flight, accepted: int, seconds: float | None = None) -> None:
        if self.drafting is not None:
            self.drafting.observe(flight.plan, flight.drafted, accepted, flight.confidences, seconds)

    def _may_run_ahead(self, left: int | None, planned: bool) -> bool:
        """Whether the next pass may start before the last token has been read, as a plain one: where nothing would be
        drafted without that token. If something would be with it, it is one token later. planned: whether that was
        found out already, since the round in flight was planned after the same tokens."""
        if left is not None:
            left -= 1  # what is in flight
            if left == 0:
                return False
        return self.target.can_rewind and self.target.chains_cheaply and (planned or self._plan(left) is None)

    def _dispatch(self, plan: Plan | None, last: mx.array | None) -> _Flight:
        """Start a round after the committed tokens or, with `last`, after one more that is still on the device."""
        started = perf_counter()
        draft_key, verify_key = mx.random.split(round_key(self._seed, len(self.tokens) + (last is not None)))
        seen = self._seen
        if last is not None and seen is not None:
            self._seen = seen = seen.at[:, last].add(1)
        newest = mx.array(self.tokens[-1:], mx.int32) if last is None else last
        confidences: tuple[float, ...] = ()
        draft_seconds: float | None = 0.0
        proposal = None
        if plan is not None and self.drafting is not None:
            proposal = self.drafting.propose(plan, self.tokens, seen, draft_key)
        if proposal is not None and self.drafting is not None:
            drafts, confidences, draft_seconds = proposal.tokens, proposal.confidences, proposal.seconds
            logits = self.target.extend(mx.concatenate([newest, drafts]))
            p = self._distribution(logits, _seen_by_row(seen, drafts))
            accepted, next_token = self.drafting.verify(p, proposal.probabilities, drafts, verify_key)
        else:
            plan, drafts, accepted = None, mx.zeros((0,), mx.int32), mx.array(0, mx.int32)
            logits = self.target.extend(newest)
            p = self._distribution(logits, seen)
            next_token = draw(p, verify_key)
        # Any row: where one has a NaN, it comes from the weights or the cache, and the others are worth nothing.
        numbers = mx.all(logits[:, : self._vocabulary_size] < mx.inf)  # false for a NaN too
        packed = mx.concatenate([mx.stack([numbers, leave_tokens(p), accepted]), next_token, drafts])
        logprobs = self._logprobs(logits, drafts, accepted, next_token)
        with memory_or(NO_MEMORY):
            mx.async_eval(packed, logprobs)
        parked = plan is None and self.drafting is not None and self.drafting.parked
        return _Flight(plan, parked, drafts.size, confidences, packed, next_token, logprobs, started, draft_seconds)

    def _distribution(self, logits: mx.array, seen: mx.array | None) -> mx.array:
        return distribution(logits, self._sampling, self._vocabulary_size, seen)

    def _logprobs(
        self, logits: mx.array, drafts: mx.array, accepted: mx.array, next_token: mx.array
    ) -> tuple[mx.array, mx.array, mx.array] | None:
        if self._sampling.top_logprobs is None:
            return None
        values = log_probabilities(logits, self._vocabulary_size)  # (k + 1, vocabulary_size)
        # Row i emits draft i, or the next token where the accepted ones end.
        emitted = mx.where(mx.arange(drafts.size + 1) == accepted, next_token, mx.concatenate([drafts, next_token]))
        count = min(self._sampling.top_logprobs, self._vocabulary_size)
        top = mx.argpartition(-values, max(count - 1, 0), axis=-1)[:, :count]
        return (
            mx.take_along_axis(values, emitted[:, None], axis=-1)[:, 0],
            top,
            mx.take_along_axis(values, top, axis=-1),
        )

    def _read(self, flight: _Flight) -> tuple[list[int], int, list[TokenLogprobs] | None]:
        """Wait for a round: its tokens, how many drafts were accepted, and log-probabilities if asked for."""
        with memory_or(NO_MEMORY):
            packed: Any = flight.packed.tolist()
        numbers, some_left, accepted, next_token, *drafts = packed
        if not numbers:
            raise MLXSpecError(
                "the model's logits are not numbers: its weights are damaged, or too large for the type they are "
                "computed in; download it again, choose another conversion of it, or try another storage (--kv)."
            )
        if not some_left:
            raise MLXSpecError(
                "no token is left to choose from: the model's logits and logit_bias together forbid every one; "
                "forbid fewer tokens."
            )
        tokens = [*drafts[:accepted], next_token]
        if flight.logprobs is None:
            return tokens, accepted, None
        read: list[Any] = [array.tolist() for array in flight.logprobs]
        chosen, top, values = read
        logprobs = [
            TokenLogprobs(token, chosen[i], sorted(zip(top[i], values[i], strict=True), key=lambda pair: -pair[1]))
            for i, token in enumerate(tokens)
        ]
        return tokens, accepted, logprobs

    def _commit(self, tokens: list[int], counted: bool) -> None:
        self.tokens.extend(tokens)
        if self._seen is not None and not counted:
            self._seen = self._seen.at[:, mx.array(tokens, mx.int32)].add(1)

    def _rewind(self) -> None:
        """Restore the invariant."""
        held = len(self.tokens) - 1
        if self.target.length > held:
            # Where a cache cannot be rewound there is nothing to take back, except after an exception.
            self.target.rewind(held if self.target.can_rewind else 0)
        self.target.settle(self.target.length)
        if self.drafting is not None:
            self.drafting.rewind(self.tokens)


def _cut(
    tokens: list[int], end_tokens: Collection[int], keep: Callable[[Sequence[int]], int | None]
) -> tuple[list[int], bool]:
    """The tokens up to the first end token or to where `keep` cuts, and whether there was one."""
    end = next((index + 1 for index, token in enumerate(tokens) if token in end_tokens), None)
    tokens = tokens[:end]
    kept = keep(tokens)
    return (tokens, end is not None) if kept is None else (tokens[:kept], True)


def _seen_by_row(seen: mx.array | None, drafts: mx.array) -> mx.array | None:
    """How often each token came before each row of a verify pass: the committed ones, then one draft more per row."""
    if seen is None:
        return None
    k = drafts.size
    before = mx.tril(mx.ones((k + 1, k)), -1)  # row i has seen drafts 0 to i - 1
    rows = mx.repeat(seen, k + 1, axis=0)  # (k + 1, vocabulary_size)
    return rows.at[:, drafts].add(before)
