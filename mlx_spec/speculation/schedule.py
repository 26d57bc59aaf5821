"""How many tokens to draft next, and by whom. Offers and outcomes in, a choice out; no clock, no device, no chance.

A schedule is asked once a round (`choose`), again between the steps of a draft model (`proceed`), and told what came of
it (`observe`). It sees counts and confidences, never token ids: what it decides depends on the committed tokens and on
those already drafted alone, so the tokens that are emitted follow the target's law whatever it decides.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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
