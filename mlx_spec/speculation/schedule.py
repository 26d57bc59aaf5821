"""How many tokens to draft next, and by whom. Offers and outcomes in, a choice out; no clock, no device, no chance.

A schedule is asked once a round (`choose`), again between the steps of a draft model (`proceed`), and told what came of
it (`observe`). It sees counts and confidences, never token ids: what it decides depends on the committed tokens and on
those already drafted alone, so the tokens that are emitted follow the target's law whatever it decides.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_spec.speculation.acceptance import Acceptance
from mlx_spec.speculation.costs import Costs

Drafter = Literal["model", "lookup"]


@dataclass(frozen=True)
class Offer:
    """What a drafter could do in the coming round.

    tokens: at most so many can be drafted; 0 is no offer.
    match, seen: of a lookup, how many tokens of the context were found before, and how often the first token it
        proposes followed them.
    lag: of a model, how many committed tokens it has to read first, beyond the newest.
    """

    drafter: Drafter
    tokens: int
    match: int = 0
    seen: int = 1
    lag: int = 0


class Schedule(Protocol):
    """Decides round by round; one for each request."""

    @property
    def parked(self) -> bool:
        """Whether the latest round was left plain because speculation could not win."""

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        """The offer to take and how many tokens to draft at most, 1 to `offer.tokens`; None for a plain round."""

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        """Whether the draft model should add a token to the `drafted` ones of this round.

        confidences: the largest probability in the distribution each of them was drawn from.
        """

    def observe(self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float]) -> None:
        """What came of a round: `accepted` of `drafted` tokens; (None, 0, 0, ()) of a plain one."""

    def plain_rounds(self) -> int:
        """How many coming rounds are plain whatever is offered, so that they need not be asked for one by one."""


class FixedSchedule:
    """Always `draft_tokens` tokens, or as many as can be had; 0 is plain decoding."""

    parked = False
    # A shorter match is as often by chance as not: a draft model does better.
    _confident_match = 3

    def __init__(self, draft_tokens: int) -> None:
        if draft_tokens < 0:
            raise ValueError(f"a round drafts 0 tokens or more, not {draft_tokens}")
        self._draft_tokens = draft_tokens

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        offers = [offer for offer in offers if offer.tokens > 0]
        if not offers or self._draft_tokens == 0:
            return None
        offer = max(offers, key=self._preference)
        return offer, min(self._draft_tokens, offer.tokens)

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        return True

    def observe(self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float]) -> None:
        pass

    def plain_rounds(self) -> int:
        return sys.maxsize if self._draft_tokens == 0 else 0

    def _preference(self, offer: Offer) -> tuple[int, int]:
        if offer.drafter == "model":
            return 1, 0
        return (2 if offer.match >= self._confident_match else 0), offer.match


class AutoSchedule:
    """As many tokens as pay, by what passes cost on this machine and what was accepted in this request; often none.

    K drafted tokens, the first i of which are all accepted with chance r_i, emit 1 + r_1 + ... + r_K tokens in
    V(K + 1) + K c plain passes (Leviathan et al. 2023, theorem 3.8, with a verifying pass that is not free and chances
    that differ by position). The best K of the best offer is taken, none where that is below the 1 of plain decoding.

    A draft model is given room to go on: after each token it is asked for another only where that should gain more
    than it costs at the best rate, given how sure of its tokens it was so far.

    What cannot win is parked and probed now and then, to notice when the text changes. A probe comes when a small
    share of what was spent since the last one pays for it; each that fails makes the share smaller.

    drafters: those that may be offered, for `plain_rounds`. stops_early: whether `proceed` is asked between the steps
    of a draft model; where steps are chained unseen it is not, and the number chosen is final.
    """

    def __init__(
        self,
        costs: Costs,
        most_draft_tokens: int,
        *,
        drafters: Collection[Drafter] = ("model", "lookup"),
        stops_early: bool = True,
    ) -> None:
        self.parked = False
        self._costs, self._stops_early = costs, stops_early
        self._most = min(most_draft_tokens, costs.most_rows - 1)
        self._drafters = [drafter for drafter in drafters if drafter == "lookup" or costs.draft_step is not None]
        self._positions = Acceptance([0.0] * self._most, accepted=2.8, rejected=1.0)
        self._sureness = Acceptance(_SURENESS, accepted=2.8, rejected=1.0)
        self._matches = Acceptance(_MATCHES, accepted=2.0, rejected=1.5)
        self._probes = {drafter: Probes() for drafter in self._drafters}
        self._probed: Drafter | None = None
        self._rate = 1.0

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        plans = [self._best(offer) for offer in offers if offer.drafter in self._drafters and offer.tokens > 0]
        plans = [plan for plan in plans if plan.tokens > 0]
        best = max(plans, key=lambda plan: plan.rate, default=None)
        self._rate = max(1.0, best.rate) if best else 1.0
        self._probed = None
        for plan in plans:
            wins = plan is best and plan.rate > 1
            if not wins and self._probes[plan.offer.drafter].affords(self._price(plan.offer)):
                self._probed = plan.offer.drafter
                self.parked = False
                return plan.offer, 1
        self.parked = best is not None and best.rate <= 1
        if best is None or self.parked:
            return None
        if best.offer.drafter == "model" and self._stops_early:
            return best.offer, min(self._most, best.offer.tokens)
        return best.offer, best.tokens

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        if self._probed or drafted >= self._most:
            return False
        positions = self._positions.reach(range(self._most))
        sure = self._sureness.reach([_sureness(confidence) for confidence in confidences])[-1]
        before = self._costs.verify(drafted + 1)
        gain = 0.0
        # A step that does not pay by itself may lead to some that do, where V is steep first and flat afterwards.
        for more in range(1, self._most - drafted + 1):
            gain += sure * positions[drafted + more - 1] / positions[drafted - 1]
            cost = more * self._costs.draft + self._costs.verify(drafted + more + 1) - before
            if gain > self._rate * cost:
                return True
        return False

    def observe(self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float]) -> None:
        spent = self._cost(offer, drafted)
        for drafter, probes in self._probes.items():
            probes.spend(spent)
            if drafter == self._probed and offer is not None:
                probes.paid(spent * self._rate - (accepted + 1))
        if offer is None:
            return
        if offer.drafter == "model":
            self._positions.observe(range(min(drafted, self._most)), accepted)
            self._sureness.observe([_sureness(confidence) for confidence in confidences], accepted)
        else:
            self._matches.observe(_matches(offer, drafted), accepted)

    def plain_rounds(self) -> int:
        if not self.parked:
            return 0
        rounds = []
        for drafter in self._drafters:
            offer = Offer(drafter, self._most, match=64, seen=64)
            if self._best(offer).rate > 1:
                return 0
            rounds.append(self._probes[drafter].rounds(self._price(offer)))
        return min(rounds, default=0)

    def _best(self, offer: Offer) -> _Plan:
        most = min(self._most, offer.tokens)
        if offer.drafter == "model":
            chances = self._positions.reach(range(most))
        else:
            chances = self._matches.reach(_matches(offer, most))
        emitted, plans = 1.0, [_Plan(offer, 0, 1.0)]
        for tokens, chance in enumerate(chances, start=1):
            emitted += chance
            plans.append(_Plan(offer, tokens, emitted / self._cost(offer, tokens)))
        highest = max(plan.rate for plan in plans[1:])
        return next(plan for plan in plans[1:] if plan.rate >= highest * _HAIR)

    def _cost(self, offer: Offer | None, drafted: int) -> float:
        cost = self._costs.verify(drafted + 1)
        if offer is not None and offer.drafter == "model":
            cost += drafted * self._costs.draft + offer.lag * self._costs.catching_up
        return cost

    def _price(self, offer: Offer) -> float:
        return self._cost(offer, 1) * self._rate - 1


@dataclass(frozen=True)
class _Plan:
    offer: Offer
    tokens: int
    rate: float


class Probes:
    _most_share, _least_share, _saved = 0.01, 0.0025, 1.0

    def __init__(self) -> None:
        self._share, self._allowance = self._most_share, 0.0

    def spend(self, cost: float) -> None:
        self._allowance = min(self._saved, self._allowance + self._share * cost)

    def affords(self, price: float) -> bool:
        return price <= self._allowance

    def paid(self, loss: float) -> None:
        self._allowance = min(self._saved, self._allowance - loss)
        self._share = self._most_share if loss < 0 else max(self._least_share, self._share / 1.5)

    def rounds(self, price: float) -> int:
        return max(0, math.ceil((price - self._allowance) / self._share) - 1)


_HAIR = 0.998
_EDGES = (0.2, 0.4, 0.6, 0.75, 0.9, 0.97)
_SURENESS = (-2.5, -1.6, -0.8, -0.2, 0.5, 1.5, 2.5)
_MATCHES = (-2.0, -1.2, -0.4, 0.4, 1.2, 2.0)


def _sureness(confidence: float) -> int:
    return bisect_right(_EDGES, confidence)


def _matches(offer: Offer, tokens: int) -> list[int]:
    return [min(len(_MATCHES) - 1, (offer.match + i - 1).bit_length()) for i in range(tokens)]
