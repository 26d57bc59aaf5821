"""What drafters offer for a round, and what a schedule may expect of each. Counts and chances only; no token ids."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_spec.decoding.schedule.acceptance import Acceptance
from mlx_spec.decoding.schedule.costs import Costs

Price = tuple[float, float]
"""In passes of plain decoding: a drafted token, and a committed one that the drafter has to read first. Infinite where
it is not known yet."""


@dataclass(frozen=True)
class Offer:
    """What a drafter could do in the coming round."""

    drafter: str
    """Its name."""
    kinds: Sequence[int]
    """Of each token that it could draft: what its chance goes by, in a counting of the drafter's own."""
    lag: int = 0
    """Committed tokens that it has to read first, beyond the newest."""
    preference: float = 0.0
    """Where costs say nothing the highest is taken: as good as a match of so many tokens."""

    @property
    def tokens(self) -> int:
        """At most so many can be drafted."""
        return len(self.kinds)


@dataclass(frozen=True)
class Outlook:
    """What to expect of one drafter, in one request."""

    drafter: str
    """Its name."""
    acceptance: Acceptance
    """Of its tokens, by the kinds of its offers."""
    best: Sequence[int]
    """Kinds of the tokens in the best offer it could ever make."""
    sureness: Acceptance | None = None
    """Of its tokens, by how sure of them it was; None where it cannot be asked between two tokens."""
    price: Callable[[Costs], Price] = lambda costs: (0.0, 0.0)


# By how sure a drafter was of a token: kinds, and how far each is from the middle one in log-odds.
_CONFIDENCES = (0.2, 0.4, 0.6, 0.75, 0.9, 0.97)
SURENESS = (-2.5, -1.6, -0.8, -0.2, 0.5, 1.5, 2.5)


def sureness_kind(confidence: float) -> int:
    """The kind of a token that was drafted with this confidence, 0 to 1."""
    return bisect_right(_CONFIDENCES, confidence)
