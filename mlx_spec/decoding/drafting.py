"""Who drafts the coming round, and how the target decides on it. Couples drafters, schedule and verification for the
engine; token ids and distributions only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.decoding.drafters.draft_model import DraftModel, Proposal
from mlx_spec.decoding.drafters.lookup import Lookup
from mlx_spec.decoding.schedule.schedule import Offer, Schedule
from mlx_spec.decoding.verification import verify_block

_LOOKED_BACK = 2**16
"""Tokens that lookup knows at least, and no more than twice as many: each takes half a kilobyte, and a stream may be
endless."""

Verify = Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array]]
"""(target (k + 1, v), draft (k, v), tokens (k,), key) -> accepted (), next token (1,)."""


@dataclass(frozen=True)
class Plan:
    """What the coming round is to draft: `k` tokens by the drafter of `offer`."""

    offer: Offer
    k: int
    found: list[int]
    """Of a lookup, the tokens."""


class Drafting:
    """The drafters of one generation, and the schedule that picks among what they offer."""

    def __init__(
        self,
        schedule: Schedule | None = None,
        *,
        model: DraftModel | None = None,
        lookup: Lookup | None = None,
        verify: Verify = verify_block,
    ) -> None:
        """schedule may be set later, such as when the prompt has been read; until then nothing is drafted."""
        self.schedule, self.model, self.lookup, self.verify = schedule, model, lookup, verify
        self._forgotten = 0  # tokens at the beginning that lookup no longer knows
        self.stops_early = False
        """Whether the schedule is asked after each token of the draft model, which takes a synchronisation."""
        self.grown: Callable[[int], None] | None = None
        """Told the number of committed tokens whenever it has doubled since the first plan: passes cost more then."""
        self._grown_at: int | None = None

    @property
    def name(self) -> str:
        """Who may draft: "model", "lookup" or, where both may, "hybrid"."""
        if self.lookup is None:
            return "model"
        return "lookup" if self.model is None else "hybrid"

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Read the prompt, the draft model all but its last token."""
        if self.lookup is not None:
            self._look_up_in(tokens, self.lookup)
        if self.model is not None:
            self.model.prefill(tokens, progress)

    def reads(self, length: int) -> bool:
        """Whether `prefill` reads a prompt of that many tokens with a model of its own."""
        return self.model is not None and self.model.reads(length)

    def plan(self, tokens: Sequence[int], most: int, vocabulary_size: int) -> Plan | None:
        """What to draft after the committed `tokens`, at most `most`; None for plain decoding. May be asked again for
        the same round once more tokens are known: the last answer counts."""
        schedule = self.schedule
        if self._grown_at is None:
            self._grown_at = len(tokens)
        elif self.grown is not None and len(tokens) >= 2 * self._grown_at:
            self._grown_at = len(tokens)
            self.grown(len(tokens))
        if most <= 0 or schedule is None or schedule.plain_rounds() > 0:
            return None
        offers: list[Offer] = []
        found: list[int] = []
        if self.lookup is not None:
            match = self._look_up_in(tokens, self.lookup).find(most)
            if match is not None and (found := _inside(match.tokens, vocabulary_size)):
                offers.append(Offer("lookup", len(found), match=match.length, seen=match.seen))
        if self.model is not None and (room := min(most, self.model.room(len(tokens)))) > 0:
            offers.append(Offer("model", room, lag=self.model.lag(tokens)))
        choice = schedule.choose(offers)
        if choice is None:
            return None
        offer, k = choice
        return Plan(offer, k, found[:k] if offer.drafter == "lookup" else [])

    def _look_up_in(self, tokens: Sequence[int], lookup: Lookup) -> Lookup:
        """Lookup that knows all of `tokens`, but for those long ago."""
        if len(tokens) - self._forgotten > 2 * _LOOKED_BACK:
            self._forgotten = len(tokens) - _LOOKED_BACK
            self.lookup = lookup = Lookup()
        try:
            lookup.extend(tokens[self._forgotten + lookup.length :])
        except BaseException:  # Ctrl-C, which may have left half a token in it
            self.lookup = Lookup()
            raise
        return lookup

    def propose(
        self, plan: Plan, tokens: Sequence[int], vocabulary_size: int, seen: mx.array | None, key: mx.array
    ) -> Proposal:
        """Draft as planned, or fewer tokens where the draft model stops early. See `DraftModel.propose`."""
        if self.model is None or plan.offer.drafter == "lookup":
            drafts = mx.array(plan.found, mx.int32)
            # A proposal that was certain to be made: all of its distribution is on it.
            certain = (mx.arange(vocabulary_size) == drafts[:, None]).astype(mx.float32)  # (k, vocabulary_size)
            return Proposal(drafts, certain)
        proceed = self.schedule.proceed if self.schedule is not None and self.stops_early else None
        return self.model.propose(tokens, plan.k, seen, key, proceed)

    def observe(self, plan: Plan | None, drafted: int, accepted: int, confidences: Sequence[float]) -> None:
        """How a round that was planned went: once per round, in order."""
        if self.schedule is not None:
            self.schedule.observe(plan.offer if plan else None, drafted, accepted, confidences)

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget drafts that are not in the committed `tokens`, which are never taken back."""
        if self.model is not None:
            self.model.observe(tokens)

    @property
    def parked(self) -> bool:
        """Whether the latest plan was plain decoding because speculation cannot win."""
        return self.schedule is not None and self.schedule.parked

    @property
    def can_rewind(self) -> bool:
        return self.model is None or self.model.context.can_rewind

    @property
    def nbytes(self) -> int:
        """Allocated for keys and values."""
        return 0 if self.model is None else self.model.context.nbytes

    def close(self) -> None:
        if self.model is not None:
            self.model.close()


def _inside(tokens: list[int], vocabulary_size: int) -> list[int]:
    """The tokens before the first that is never emitted: a prompt may hold ids that are the embedding's padding."""
    end = next((index for index, token in enumerate(tokens) if token >= vocabulary_size), None)
    return tokens[:end]
