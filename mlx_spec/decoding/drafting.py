"""Who drafts the coming round, and how the target decides on it. Couples drafters, schedule, verification and what is
learned of costs for the engine; token ids and distributions only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.decoding.drafters.protocol import Drafter, Proposal
from mlx_spec.decoding.schedule.learning import CostLearner, RoundTime
from mlx_spec.decoding.schedule.offers import Offer
from mlx_spec.decoding.schedule.schedule import Schedule
from mlx_spec.decoding.verification import verify_block
from mlx_spec.errors import DoesNotFit
from mlx_spec.machine.memory import NO_MEMORY, memory_or
from mlx_spec.settings import HYBRID

_log = logging.getLogger("mlx_spec")

Verify = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
"""(target (k + 1, v), draft (k, v), tokens (k,), key) -> accepted (), next token (1,)."""


@dataclass(frozen=True)
class Plan:
    """What the coming round is to draft: `k` tokens by the drafter of `offer`."""

    offer: Offer
    k: int


class Drafting:
    """The drafters of one generation, and the schedule that picks among what they offer."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        schedule: Schedule,
        *,
        verify: Verify = verify_block,
        learner: CostLearner | None = None,
    ) -> None:
        """drafters: at least one. learner: what the schedule's costs come from, and what the rounds' times go to."""
        self.verify, self.schedule = verify, schedule
        self.name = drafters[0].name if len(drafters) == 1 else HYBRID
        """Who may draft, as in the settings."""
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._learner = learner
        self._priced_at: int | None = None  # committed tokens

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Read the prompt, a draft model all but its last token."""
        for drafter in list(self._drafters.values()):
            try:
                drafter.prefill(tokens, progress)
            except DoesNotFit as error:
                self._give_up(drafter, error)

    def reads(self, length: int) -> bool:
        """Whether `prefill` reads a prompt of that many tokens with a model of its own."""
        return any(drafter.reads(length) for drafter in self._drafters.values())

    def plan(self, tokens: Sequence[int], most: int) -> Plan | None:
        """What to draft after the committed `tokens`, at most `most`; None for plain decoding. May be asked again for
        the same round once more tokens are known: the last answer counts."""
        if self._priced_at is None or len(tokens) >= 2 * self._priced_at:
            self._reprice(len(tokens))  # passes cost more in a longer context
        if most <= 0 or self.schedule.plain_rounds() > 0:
            return None
        offers = [drafter.offer(tokens, most) for drafter in self._drafters.values() if drafter.can_rewind]
        choice = self.schedule.choose([offer for offer in offers if offer is not None])
        return choice and Plan(*choice)

    def propose(self, plan: Plan, tokens: Sequence[int], seen: mx.array | None, key: mx.array) -> Proposal | None:
        """Draft as planned, or fewer tokens where the drafter stops early; None where it has no memory for that, and so
        has ended. See `Drafter.propose`."""
        drafter = self._drafters[plan.offer.drafter]
        proceed = self.schedule.proceed if self.schedule.stops_early else None
        try:
            with memory_or(NO_MEMORY):
                return drafter.propose(tokens, plan.k, seen, key, proceed)
        except DoesNotFit as error:
            self._give_up(drafter, error)
            return None

    def observe(
        self, plan: Plan | None, drafted: int, accepted: int, confidences: Sequence[float],
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        """How a round that was planned went: once per round, in order. See `Schedule.observe`."""
        self.schedule.observe(plan.offer if plan else None, drafted, accepted, confidences, seconds)

    def timed(
        self, length: int, plan: Plan | None, drafted: int, seconds: float, draft_seconds: float | None
    ) -> None:
        """How long a round after `length` committed tokens took. See `RoundTime`."""
        if self._learner is not None:
            drafter, lag = (plan.offer.drafter, plan.offer.lag) if plan else (None, 0)
            if self._learner.observe(length, RoundTime(drafted + 1, seconds, drafter, lag, draft_seconds)):
                self._reprice(length)

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget drafts that are not in the committed `tokens`, which are never taken back."""
        for drafter in self._drafters.values():
            drafter.rewind(tokens)

    @property
    def parked(self) -> bool:
        """Whether the latest plan was plain decoding because speculation cannot win."""
        return self.schedule.parked

    @property
    def nbytes(self) -> int:
        """Allocated for keys and values."""
        return sum(drafter.nbytes for drafter in self._drafters.values())

    def close(self) -> None:
        """The request has ended: what was learned is remembered, and all memory given back."""
        try:
            if self._learner is not None:
                self._learner.close()
        finally:
            for drafter in self._drafters.values():
                drafter.close()

    def _reprice(self, length: int) -> None:
        self._priced_at = length
        if self._learner is not None:
            costs = self._learner.costs(length)
            for drafter in self._drafters.values():
                drafter.adapt(costs)
            self.schedule.reprice(costs)

    def _give_up(self, drafter: Drafter, error: DoesNotFit) -> None:
        """An answer goes on without a drafter that has no memory."""
        _log.warning(f"no more drafts by the {drafter.name} drafter in this answer: {error}")
        self._drafters = {name: other for name, other in self._drafters.items() if other is not drafter}
        drafter.close()
