"""What a drafter is to those who ask it: the engine, `Drafting` and the schedule know no kinds of drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import Offer, Outlook

Proceed = Callable[[int, Sequence[float]], bool]
"""(tokens drafted, their confidences) -> whether to draft one more."""


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens (k,) int32 and the distributions they were drawn from, (k, vocabulary_size)."""

    tokens: mx.array
    probabilities: mx.array
    confidences: tuple[float, ...] = ()
    """The largest probability that the draft gave any token at each place, before temperature and filters; only where
    it could stop early."""
    seconds: float | None = 0.0
    """What drafting took: 0 where it took no pass, None where tokens were not waited for."""


class Drafter(Protocol):
    """Proposes tokens for one request. What it holds of a model of its own is a prefix of the committed tokens between
    rounds; one that goes by the target's hidden states would be given them with the committed tokens."""

    @property
    def name(self) -> str:
        """As in the settings and in statistics."""

    @property
    def outlook(self) -> Outlook:
        """What a schedule may expect: chances that are learned in this request, and what a token costs."""

    @property
    def can_rewind(self) -> bool:
        """Whether it can forget tokens that were not accepted; one that cannot is never asked."""

    @property
    def nbytes(self) -> int:
        """Allocated for keys and values."""

    def adapt(self, costs: Costs) -> None:
        """Draft the way that these costs are of: they are what is known from now on."""

    def reads(self, length: int) -> bool:
        """Whether `prefill` reads a prompt of so many tokens with a model of its own."""

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Read the prompt, a model all but its last token. progress is told how many tokens each pass had."""

    def offer(self, tokens: Sequence[int], most: int) -> Offer | None:
        """What could be drafted after the committed `tokens`, at most `most`; None for nothing."""

    def propose(
        self, tokens: Sequence[int], k: int, seen: mx.array | None, key: mx.array, proceed: Proceed | None = None
    ) -> Proposal:
        """Draft k tokens after the committed `tokens`, of which the latest offer was made, or fewer, at least one,
        where `proceed` says no.

        seen: how often each token is in `tokens`, (1, vocabulary_size), where the sampling settings need it.
        Stopping leaves the law exact as long as `proceed` knows nothing of tokens that are not drafted yet.
        Raises DoesNotFit where there is no memory for it.
        """

    def rewind(self, tokens: Sequence[int]) -> None:
        """Forget drafts that are not in the committed `tokens`, which are never taken back."""

    def close(self) -> None:
        """Give the memory back."""
