"""As many tokens as pay, by costs and outcomes. Offers and outcomes in, a choice out; no clock, device, or chance."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import Offer, Outlook, sureness_kind
from mlx_spec.decoding.schedule.probing import Allowance, Venture


class _Standing:
    """How one drafter stands in this request."""

    def __init__(self, outlook: Outlook) -> None:
        self.outlook = outlook
        self.step = self.row = math.inf  # see `Price`
        self.allowance: Allowance | None = None  # while it is not known what a probe would cost
        self.reached: list[float] = []  # chances that the first n of its latest offer are all accepted
        self.left = False  # whether it could not win at some time, and none of its tokens won since
        self.saved_for_reading = 0.0
        self.lag = 0
        self.ventured: dict[int, float] = {}  # what rounds of unknown cost took that drafted so many tokens, the latest


class AutoSchedule:
    """As many tokens as pay, by what passes cost on this machine and what was accepted in this request; often none.

    The number of tokens with the best speedup (`Costs.speedups`) of the best offer is drafted, and none where that is
    not above the 1 of plain decoding.

    A drafter that can be asked is given room to go on: after each token it is asked for another only where that should
    gain more than it costs at the best rate, given how sure of its tokens it was so far. What cannot win is parked, and
    probed with one token now and then, to notice when the text changes (`Allowance`). A parked draft model has ever
    more to read before it can draft again. It comes back where that costs no more than a small share of the time spent
    and a part of what it won before: where reading a token costs more than that share, a model that has won nothing
    stays parked for good.

    Costs that are not known are found out by rounds that draft a little further than is known to pay, where that is
    promising, as soon as the worst that it could cost is within a small share of the time spent (`Venture`).
    """

    # Of two numbers of tokens that are this close, the smaller: it costs less to be wrong with.
    _close = 0.998
    # What coming back may cost a drafter that failed: of the time spent, and of what it won over plain decoding.
    _share_for_reading, _share_of_gains = 0.012, 0.5

    def __init__(self, costs: Costs, most_draft_tokens: int, outlooks: Sequence[Outlook]) -> None:
        """outlooks: of those drafters that may ever be offered."""
        self.parked = self.whole_rounds = self._waiting = False
        self._furthest = most_draft_tokens
        self._standings = {outlook.drafter: _Standing(outlook) for outlook in outlooks}
        self._venture = Venture()
        self._rate = 1.0  # the best that could be had this round, in tokens for the time of a plain pass
        self._probing = self._venturing = False
        self._chosen: _Standing | None = None
        self.reprice(costs)

    def reprice(self, costs: Costs) -> None:
        self._costs, self.stops_early = costs, not costs.draft_chained
        self._hoped = costs.hopeful(self._furthest + 1)
        self._most = max(0, min(self._furthest, costs.most_rows - 1))  # tokens for which the target's cost is known
        for standing in self._standings.values():
            standing.step, standing.row = standing.outlook.price(costs)
            price = standing.step + costs.verify(2) - 1
            if standing.allowance is not None:
                standing.allowance.reprice(price)
            elif price < math.inf and self._most > 0:
                standing.allowance = Allowance(price)

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        offers = [offer for offer in offers if offer.tokens > 0 and offer.drafter in self._standings]
        best, best_rates, highest, losing = None, [0.0], 0.0, []
        for offer in offers:
            standing = self._standings[offer.drafter]
            standing.lag = offer.lag
            rates = self._rates(offer)
            standing.left |= standing.allowance is not None and max(rates) <= 1
            if not self._must_wait(offer):
                losing.append(offer)
                if max(rates) > highest:
                    best, best_rates, highest = offer, rates, max(rates)
        self._rate = max(1.0, highest)
        if best is not None and highest > 1:
            losing.remove(best)
        self._probing = self._venturing = False
        choice = self._venture_on(offers) or self._probe(losing)
        if choice is None and best is not None and highest > 1:
            asked = self.stops_early and self._standings[best.drafter].outlook.sureness is not None
            few = 1 + next(k for k, rate in enumerate(best_rates) if rate >= highest * self._close)
            choice = best, min(self._most, best.tokens) if asked else few
        self._waiting = choice is None and len(offers) > 0
        self.parked = self._waiting and self._most > 0  # else nobody knows whether it could win
        self._chosen = self._standings[choice[0].drafter] if choice is not None else None
        return choice

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        if self._venturing:
            return True
        chosen = self._chosen
        if self._probing or drafted >= self._most or chosen is None or chosen.outlook.sureness is None:
            return False
        reached = chosen.reached
        sure = chosen.outlook.sureness.reach([sureness_kind(confidence) for confidence in confidences])[-1]
        verified = self._costs.verify(drafted + 1)
        gain = 0.0
        # A step that does not pay by itself may lead to some that do, where V rises first and is flat afterwards.
        for more in range(1, len(reached) - drafted + 1):
            gain += sure * reached[drafted + more - 1] / reached[drafted - 1]
            if gain > self._rate * (more * chosen.step + self._costs.verify(drafted + more + 1) - verified):
                return True
        return False

    def observe(
        self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float],
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        cost = self._cost(offer, drafted)
        if self._venturing and offer is not None:
            cost = self._worst(offer, drafted) if seconds is None else seconds / self._costs.plain
            self._venture.spend(cost - (accepted + 1) / self._rate)
            self._standings[offer.drafter].ventured[drafted] = cost
        self._venture.save(cost)
        for name, standing in self._standings.items():
            outlook = standing.outlook
            if standing.allowance is not None:
                standing.allowance.save(cost)
            standing.saved_for_reading += self._share_for_reading * cost
            if offer is None or offer.drafter != name:
                standing.lag += accepted + 1
                outlook.acceptance.rest()
                if outlook.sureness is not None:
                    outlook.sureness.rest()
                continue
            gain = accepted + 1 - cost
            standing.saved_for_reading = max(0.0, standing.saved_for_reading + self._share_of_gains * gain)
            if self._probing and standing.allowance is not None:
                # What it really lost, so that one success lets the next follow: it takes a few to be sure of a drafter.
                lost = (cost + (accepted == drafted) * standing.row) * self._rate - 1 - accepted
                standing.allowance.spend(lost, accepted > 0)
            standing.left &= accepted == 0
            standing.lag = int(accepted == drafted)
            outlook.acceptance.observe(offer.kinds[:drafted], accepted)
            if outlook.sureness is not None:
                outlook.sureness.observe([sureness_kind(confidence) for confidence in confidences], accepted)
        self._probing = self._venturing = False

    def plain_rounds(self) -> int:
        if not self._waiting:
            return 0
        least = sys.maxsize
        for name, standing in self._standings.items():
            offer = Offer(name, standing.outlook.best[: self._furthest], standing.lag)
            if max(self._rates(offer)) > 1:
                return 0
            if standing.allowance is not None:
                least = min(least, standing.allowance.rounds(self._loss(offer)))
            if tokens := self._further(offer):
                least = min(least, self._venture.rounds(self._worst(offer, tokens) - 1 / self._rate))
        return least

    def _probe(self, losing: Sequence[Offer]) -> tuple[Offer, int] | None:
        """One token of what would not win, if it may be spent: who is likeliest to win first, since a draft model that
        is left alone meanwhile has ever more to read."""
        for loss, offer in sorted(((self._loss(offer), offer) for offer in losing), key=lambda pair: pair[0]):
            allowance = self._standings[offer.drafter].allowance
            if allowance is not None and allowance.affords(loss):
                self._probing = True
                return offer, 1
        return None

    def _venture_on(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        """A round that finds out a cost, if it may be spent."""
        for offer in offers:
            tokens = self._further(offer)
            if tokens and self._venture.affords(self._worst(offer, tokens) - 1 / self._rate):
                self._venturing = True
                return offer, tokens
        return None

    def _further(self, offer: Offer) -> int:
        """How many tokens of an offer would find out a cost, if that is promising; else 0."""
        standing, rows = self._standings[offer.drafter], self._costs.most_rows
        known = standing.step < math.inf
        tokens = rows if known else 1
        if rows == 0 or tokens > min(self._furthest, offer.tokens):
            return 0
        reach = standing.outlook.acceptance.reach(offer.kinds[:tokens])
        hoped = self._hoped.speedups(reach, standing.step if known else 0.0, standing.row, offer.lag)
        return tokens if hoped[-1] > self._rate else 0

    def _worst(self, offer: Offer, tokens: int) -> float:
        """The most that a round of so many tokens can cost: what one did, or a plain pass for each row and step."""
        standing, known = self._standings[offer.drafter], max(1, min(tokens + 1, self._costs.most_rows))
        cost = self._costs.verify(known) + tokens + 1 - known + tokens * min(1.0, standing.step)
        return min(cost, standing.ventured.get(tokens, cost)) + offer.lag * standing.row

    def _must_wait(self, offer: Offer) -> bool:
        """Whether coming back would cost a drafter more than may be spent on that. One token is what a round that was
        accepted whole leaves: who goes on has that to read too."""
        standing = self._standings[offer.drafter]
        return standing.left and (offer.lag - 1) * standing.row > standing.saved_for_reading

    def _rates(self, offer: Offer) -> list[float]:
        """Tokens for the time of a plain pass, of drafts of 1, 2, ... tokens; 0 where nothing is known."""
        standing = self._standings[offer.drafter]
        standing.reached = standing.outlook.acceptance.reach(offer.kinds[: self._most])
        return self._costs.speedups(standing.reached, standing.step, standing.row, offer.lag) or [0.0]

    def _loss(self, offer: Offer) -> float:
        """What drafting one token is expected to lose against the best there is."""
        standing = self._standings[offer.drafter]
        [reach] = standing.outlook.acceptance.reach(offer.kinds[:1])
        return (self._cost(offer, 1) + reach * standing.row) * self._rate - 1 - reach

    def _cost(self, offer: Offer | None, drafted: int) -> float:
        if offer is None:
            return 1.0
        standing = self._standings[offer.drafter]
        return self._costs.verify(drafted + 1) + drafted * standing.step + offer.lag * standing.row
