"""Drafts that cost nothing: what followed the latest tokens where they were seen before, in the prompt or the output
(Saxena 2023, prompt lookup decoding). Knows the committed tokens as numbers; nothing of models or text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_spec.decoding.drafters.protocol import Proceed, Proposal
from mlx_spec.decoding.drafters.suffixes import Match, Suffixes
from mlx_spec.decoding.schedule.acceptance import Acceptance
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import Offer, Outlook
from mlx_spec.settings import LOOKUP, MOST_AUTO_DRAFT_TOKENS

_LOOKED_BACK = 2**16
"""Tokens that are known at least, and no more than twice as many: each takes half a kilobyte, and a stream may be
endless."""
# Kinds of tokens by bits of the matched length: 1, 2-3, 4-7, 8-15, 16-31, 32 and more; how far each is from the middle
# one in log-odds. In text of code, edits of code, JSON and prose 0.2-0.5, 0.4-0.8, 0.7-0.93, 0.9-0.98 and 0.93-1 of the
# tokens after matches of 2 and more were the right ones.
_MATCHES = (-2.2, -1.2, 0.0, 1.2, 2.2, 3.0)
# The first token is as good as after the next longer match where it was seen so often: 0.38-0.52 instead of 0.15-0.5.
_OFTEN = 3


def match_offer(match: Match) -> Offer:
    """A token that follows accepted ones has them in its match too; one that followed often is as good as one that
    followed a longer match."""
    bits = [(match.length + index).bit_length() for index in range(len(match.tokens))]
    if bits and match.seen >= _OFTEN:
        bits[0] += 1
    kinds = [min(max(bit, 1), len(_MATCHES)) - 1 for bit in bits]
    return Offer(LOOKUP, kinds, preference=match.length)


def lookup_outlook() -> Outlook:
    """Of matches."""
    best = [len(_MATCHES) - 1] * MOST_AUTO_DRAFT_TOKENS
    return Outlook(LOOKUP, Acceptance(_MATCHES, accepted=2.0, rejected=1.5), best)


class Lookup:
    """Drafts by what the committed tokens hold already."""

    name, can_rewind, nbytes = LOOKUP, True, 0

    def __init__(self, vocabulary_size: int, shortest: int = 2) -> None:
        """vocabulary_size: no id past it is proposed; shortest: a suffix of fewer tokens is no match."""
        self._vocabulary_size, self._shortest = vocabulary_size, shortest
        self._suffixes = Suffixes(shortest)
        self._forgotten = 0  # tokens at the beginning that are no longer known
        self._found: list[int] = []
        self.outlook = lookup_outlook()

    def adapt(self, costs: Costs) -> None:
        pass

    def reads(self, length: int) -> bool:
        return False

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Time per token is constant."""
        if len(tokens) - self._forgotten > 2 * _LOOKED_BACK:
            self._forgotten = len(tokens) - _LOOKED_BACK
            self._suffixes = Suffixes(self._shortest)
        try:
            self._suffixes.extend(tokens[self._forgotten + self._suffixes.length :])
        except BaseException:  # Ctrl-C, which may have left half a token in it
            self._suffixes = Suffixes(self._shortest)
            raise

    def offer(self, tokens: Sequence[int], most: int) -> Offer | None:
        self.prefill(tokens)
        match = self._suffixes.find(most)
        if match is None:
            return None
        # A prompt may hold ids that are the embedding's padding.
        outside = (index for index, token in enumerate(match.tokens) if token >= self._vocabulary_size)
        self._found = match.tokens[: next(outside, None)]
        return match_offer(Match(match.length, self._found, match.seen)) if self._found else None

    def propose(
        self, tokens: Sequence[int], k: int, seen: mx.array | None, key: mx.array, proceed: Proceed | None = None
    ) -> Proposal:
        drafts = mx.array(self._found[:k], mx.int32)
        # A proposal that was certain to be made: all of its distribution is on it.
        certain = (mx.arange(self._vocabulary_size) == drafts[:, None]).astype(mx.float32)  # (k, vocabulary_size)
        return Proposal(drafts, certain)

    def rewind(self, tokens: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass
