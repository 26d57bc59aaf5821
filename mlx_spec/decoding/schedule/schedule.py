"""How many tokens to draft next, and by whom. Offers and outcomes in, a choice out; no clock, no device, no chance.

A schedule is asked once a round (`choose`), again between the steps of a draft model (`proceed`), and told what came of
it (`observe`). It sees counts and confidences, never token ids: what it decides depends on the committed tokens and on
those already drafted alone, so the tokens that are emitted follow the target's law whatever it decides.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mlx_spec.decoding.schedule.acceptance import Acceptance
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.probing import Allowance

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
        """Whether the latest round was left plain because speculation could not win, or only by what was not to be
        spent on it."""

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        """The offer to take and how many tokens to draft at most, 1 to `offer.tokens`; None for a plain round. May be
        asked again for the same round, with other offers: the last answer counts."""

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        """Whether the draft model should add a token to the `drafted` ones of this round.

        confidences: the largest probability that the draft model gave any token where each of them stands, before
        temperature and filters.
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

    The number of tokens with the best speedup (`Costs.speedups`) of the best offer is drafted, and none where that is
    not above the 1 of plain decoding.

    A draft model is given room to go on: after each token it is asked for another only where that should gain more
    than it costs at the best rate, given how sure of its tokens it was so far. What cannot win is parked, and probed
    with one token now and then, to notice when the text changes (`Allowance`). A parked draft model has ever more to
    read before it can draft again. It comes back where that costs no more than a small share of the time spent and a
    part of what it won before: where reading a token costs more than that share, a model that has won nothing stays
    parked for good.
    """

    # Of two numbers of tokens that are this close, the smaller: it costs less to be wrong with.
    _close = 0.998
    # What coming back may cost a draft model that failed: of the time spent, and of what it won over plain decoding.
    _share_for_reading, _share_of_gains = 0.012, 0.5

    def __init__(
        self,
        costs: Costs,
        most_draft_tokens: int,
        *,
        drafters: Collection[Drafter] = ("model", "lookup"),
        stops_early: bool = True,
    ) -> None:
        """drafters: those that may ever be offered. stops_early: whether `proceed` is asked between the steps of a
        draft model; where its steps are chained unseen it is not, and the number chosen is final."""
        self.parked = False
        self._costs, self._stops_early = costs, stops_early
        self._most = max(0, min(most_draft_tokens, costs.most_rows - 1))
        usable = [drafter for drafter in drafters if drafter == "lookup" or costs.draft_step is not None]
        # Small models of a large one's family mostly have 0.6 to 0.9 accepted.
        self._positions = Acceptance([0.0] * self._most, accepted=2.8, rejected=0.9, hopeless=0.05)
        self._sureness = Acceptance(_SURENESS, accepted=2.8, rejected=0.9, hopeless=0.05, slopes=(0.0, 0.5, 1.0))
        self._matches = Acceptance(_MATCHES, accepted=2.0, rejected=1.5)
        self._allowances = {
            drafter: Allowance(self._cost(Offer(drafter, 1), 1) - 1) for drafter in usable if self._most > 0
        }
        self._rate = 1.0  # the best that could be had this round, in tokens for the time of a plain pass
        self._probing: Drafter | None = None
        self._left = False  # whether the draft model could not win at some time, and none of its tokens won since
        self._saved_for_reading = 0.0
        self._reached = self._positions.reach(range(self._most))
        self._lag = 0

    def reprice(self, costs: Costs, *, stops_early: bool) -> None:
        """Go by other costs from now on, as of a longer context; who may draft and how far stays as it is."""
        self._costs, self._stops_early = costs, stops_early
        for drafter, allowance in self._allowances.items():
            allowance.reprice(self._cost(Offer(drafter, 1), 1) - 1)

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        offers = [offer for offer in offers if offer.tokens > 0 and offer.drafter in self._allowances]
        self._lag = next((offer.lag for offer in offers if offer.drafter == "model"), self._lag)
        rates = {offer: self._rates(offer) for offer in offers}
        self._left |= any(offer.drafter == "model" and max(rates[offer]) <= 1 for offer in offers)
        offered, offers = bool(offers), [offer for offer in offers if not self._must_wait(offer)]
        best = max(offers, key=lambda offer: max(rates[offer]), default=None)
        highest = max(rates[best]) if best is not None else 0.0
        self._rate = max(1.0, highest)
        self._probing, self.parked = None, False
        losing = [offer for offer in offers if offer != best or highest <= 1]
        # Who is likeliest to win first: a draft model that is left alone meanwhile has ever more to read.
        for loss, offer in sorted(((self._loss(offer), offer) for offer in losing), key=lambda pair: pair[0]):
            if self._allowances[offer.drafter].affords(loss):
                self._probing = offer.drafter
                return offer, 1
        if best is None or highest <= 1:
            self.parked = offered
            return None
        if best.drafter == "model" and self._stops_early:
            return best, min(self._most, best.tokens)
        return best, 1 + next(k for k, rate in enumerate(rates[best]) if rate >= highest * self._close)

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        if self._probing or drafted >= self._most:
            return False
        reached = self._reached
        sure = self._sureness.reach([_sureness(confidence) for confidence in confidences])[-1]
        verified = self._costs.verify(drafted + 1)
        gain = 0.0
        # A step that does not pay by itself may lead to some that do, where V rises first and is flat afterwards.
        for more in range(1, self._most - drafted + 1):
            gain += sure * reached[drafted + more - 1] / reached[drafted - 1]
            if gain > self._rate * (more * self._costs.draft + self._costs.verify(drafted + more + 1) - verified):
                return True
        return False

    def observe(self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float]) -> None:
        for allowance in self._allowances.values():
            allowance.save(self._cost(offer, drafted))
        self._saved_for_reading += self._share_for_reading * self._cost(offer, drafted)
        if offer is not None and offer.drafter == "model":
            gain = accepted + 1 - self._cost(offer, drafted)
            self._saved_for_reading = max(0.0, self._saved_for_reading + self._share_of_gains * gain)
        if self._probing is not None and offer is not None:
            # What it really lost, so that one success lets the next follow: it takes a few to be sure of a drafter.
            cost = self._cost(offer, drafted) + (accepted == drafted) * self._read_later(offer)
            self._allowances[self._probing].spend(cost * self._rate - 1 - accepted, accepted > 0)
        self._probing = None
        if offer is not None and offer.drafter == "model":
            self._left &= accepted == 0
            self._positions.observe(range(min(drafted, self._most)), accepted)
            self._reached = self._positions.reach(range(self._most))
            self._sureness.observe([_sureness(confidence) for confidence in confidences], accepted)
            self._lag = int(accepted == drafted)
            self._matches.rest()
            return
        self._positions.rest()
        self._reached = self._positions.reach(range(self._most))
        self._sureness.rest()
        self._lag += accepted + 1
        if offer is not None:
            self._matches.observe(_matches(offer, drafted), accepted)
        else:
            self._matches.rest()

    def plain_rounds(self) -> int:
        if not self.parked:
            return 0
        # The best that each drafter could offer.
        offers = [Offer(drafter, self._most, match=sys.maxsize, lag=self._lag) for drafter in self._allowances]
        if any(max(self._rates(offer)) > 1 for offer in offers):
            return 0
        return min(self._allowances[offer.drafter].rounds(self._loss(offer)) for offer in offers)

    def _must_wait(self, offer: Offer) -> bool:
        """Whether coming back would cost a draft model more than may be spent on that. One token is what a round that
        was accepted whole leaves: who goes on has that to read too."""
        reading = (offer.lag - 1) * self._costs.catching_up
        return offer.drafter == "model" and self._left and reading > self._saved_for_reading

    def _reach(self, offer: Offer, tokens: int) -> list[float]:
        if offer.drafter == "model":
            return self._reached[:tokens]
        return self._matches.reach(_matches(offer, tokens))

    def _rates(self, offer: Offer) -> list[float]:
        """Tokens for the time of a plain pass, of drafts of 1, 2, ... tokens."""
        reach = self._reach(offer, min(self._most, offer.tokens))
        if offer.drafter == "lookup":
            return self._costs.speedups(reach, 0.0)
        return self._costs.speedups(reach, self._costs.draft, self._costs.catching_up, offer.lag)

    def _loss(self, offer: Offer) -> float:
        """What drafting one token is expected to lose against the best there is."""
        reach = self._reach(offer, 1)[0]
        return (self._cost(offer, 1) + reach * self._read_later(offer)) * self._rate - 1 - reach

    def _read_later(self, offer: Offer) -> float:
        """A draft model that has everything accepted has yet to read its last token."""
        return self._costs.catching_up if offer.drafter == "model" else 0.0

    def _cost(self, offer: Offer | None, drafted: int) -> float:
        cost = self._costs.verify(drafted + 1)
        if offer is not None and offer.drafter == "model":
            cost += drafted * self._costs.draft + offer.lag * self._costs.catching_up
        return cost


# Kinds of drafted tokens, and how far each is from the middle one in log-odds. By the draft's confidence:
_CONFIDENCES = (0.2, 0.4, 0.6, 0.75, 0.9, 0.97)
_SURENESS = (-2.5, -1.6, -0.8, -0.2, 0.5, 1.5, 2.5)
# By bits of the matched length: 1, 2-3, 4-7, 8-15, 16-31, 32 and more. In text of code, edits of code, JSON and prose
# 0.2-0.5, 0.4-0.8, 0.7-0.93, 0.9-0.98 and 0.93-1 of the tokens after matches of 2 and more were the right ones.
_MATCHES = (-2.2, -1.2, 0.0, 1.2, 2.2, 3.0)
# The first token is as good as after the next longer match where it was seen so often: 0.38-0.52 instead of 0.15-0.5.
_OFTEN = 3


def _sureness(confidence: float) -> int:
    return bisect_right(_CONFIDENCES, confidence)


def _matches(offer: Offer, tokens: int) -> list[int]:
    """A token that follows accepted ones has them in its match too; one that followed often is as good as one that
    followed a longer match."""
    bits = [(offer.match + index).bit_length() for index in range(tokens)]
    if bits and offer.seen >= _OFTEN:
        bits[0] += 1
    return [min(max(bit, 1), len(_MATCHES)) - 1 for bit in bits]
