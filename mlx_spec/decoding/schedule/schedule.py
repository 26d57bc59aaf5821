"""Who decides how many tokens to draft next, and by whom: what every schedule is asked and told, and the simplest one.

A schedule is asked once a round (`choose`), again between the steps of a drafter that can be asked (`proceed`), and
told what came of it (`observe`). It sees counts, confidences and times, never token ids: what it decides depends on the
committed tokens and on those already drafted alone, so the tokens that are emitted follow the target's law whatever it
decides.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import Offer


class Schedule(Protocol):
    """Decides round by round; one for each request."""

    @property
    def parked(self) -> bool:
        """Whether the latest round was left plain because speculation could not win, or only by what was not to be
        spent on it."""

    @property
    def whole_rounds(self) -> bool:
        """Whether a limit on the answer's tokens leaves the choice as it is, so that an answer begins as a longer one
        does; what is drafted beyond the limit is lost."""

    @property
    def stops_early(self) -> bool:
        """Whether `proceed` is to be asked after each token of a drafter that can be asked, which has to be waited for
        then; where it is not, the number chosen is final."""

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        """The offer to take and how many tokens to draft at most, 1 to `offer.tokens`; None for a plain round. May be
        asked again for the same round, with other offers: the last answer counts."""

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        """Whether the drafter should add a token to the `drafted` ones of this round.

        confidences: the largest probability that it gave any token where each of them stands, before temperature and
        filters.
        """

    def observe(
        self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float],
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        """What came of a round: `accepted` of `drafted` tokens; (None, 0, 0, ()) of a plain one. seconds: how long it
        took, if that could be told."""

    def plain_rounds(self) -> int:
        """How many coming rounds are plain whatever is offered, so that they need not be asked for one by one."""

    def reprice(self, costs: Costs) -> None:
        """Go by these costs from now on: more is known, or the context has grown."""


class FixedSchedule:
    """Always `draft_tokens` tokens, or as many as can be had; 0 is plain decoding."""

    parked = stops_early = False
    whole_rounds = True

    def __init__(self, draft_tokens: int) -> None:
        if draft_tokens < 0:
            raise ValueError(f"a round drafts 0 tokens or more, not {draft_tokens}")
        self._draft_tokens = draft_tokens

    def choose(self, offers: Sequence[Offer]) -> tuple[Offer, int] | None:
        offer = max((offer for offer in offers if offer.tokens > 0), key=lambda offer: offer.preference, default=None)
        if offer is None or self._draft_tokens == 0:
            return None
        return offer, min(self._draft_tokens, offer.tokens)

    def proceed(self, drafted: int, confidences: Sequence[float]) -> bool:
        return True

    def observe(
        self, offer: Offer | None, drafted: int, accepted: int, confidences: Sequence[float],
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        pass

    def plain_rounds(self) -> int:
        return sys.maxsize if self._draft_tokens == 0 else 0

    def reprice(self, costs: Costs) -> None:
        pass
