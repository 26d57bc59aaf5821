"""A small language model that runs ahead of the target. Knows its own context; nothing of the target's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_spec.architectures.context import Context, prefill
from mlx_spec.decoding.sampling import distribution, draw, log_probabilities
from mlx_spec.settings import MOST_DRAFT_TOKENS, Sampling

_log = logging.getLogger("mlx_spec")


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens (k,) int32 and the distributions they were drawn from, (k, vocabulary_size)."""

    tokens: mx.array
    probabilities: mx.array
    confidences: tuple[float, ...] = ()
    """The largest probability that the draft gave any token at each place, before temperature and filters; only where
    it could stop early."""


Proceed = Callable[[int, Sequence[float]], bool]
"""(tokens drafted, their confidences) -> whether to draft one more."""


class DraftModel:
    """Drafts with a model of its own, under the same sampling settings as the target."""

    def __init__(
        self, context: Context, sampling: Sampling, vocabulary_size: int, context_length: int | None = None
    ) -> None:
        self.context = context
        self._sampling, self._vocabulary_size = sampling, vocabulary_size
        self._context_length = context_length
        self._told = False
        self.lazily: bool | None = None
        """Whether a step is built on the one before while that is still in flight; None is where that is cheap, which
        changes as the cache grows. Not asked where the draft stops early: then each token is waited for."""

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Read all of `tokens` but the last, if the draft can go on from there."""
        if self.reads(len(tokens)):
            prefill(self.context, self._known(tokens), progress)

    def reads(self, length: int) -> bool:
        """Whether the draft's own context reaches that far: `prefill` does nothing otherwise."""
        return self._context_length is None or length <= self._context_length

    def room(self, length: int) -> int:
        """How many tokens can be drafted after `length` committed ones. Says so once when the draft's context ends."""
        if self._context_length is None:
            return sys.maxsize
        if length >= self._context_length and not self._told:
            self._told = True
            _log.warning(f"the draft's context of {self._context_length} tokens is full: no drafts by it from here on")
        return max(0, self._context_length - length)

    def lag(self, tokens: Sequence[int]) -> int:
        """How many of the committed `tokens`, the newest aside, it has yet to read."""
        return len(tokens) - 1 - self.context.length

    def propose(
        self, tokens: Sequence[int], k: int, seen: mx.array | None, key: mx.array, proceed: Proceed | None = None
    ) -> Proposal:
        """Draft k tokens after the committed `tokens`, or fewer, at least one, where `proceed` says no.

        seen: how often each token is in `tokens`, (1, vocabulary_size), where the sampling settings need it.
        The first pass also reads what was committed since the last proposal: the newest token and, after a round
        that accepted everything, the last drafted one; after rounds without this drafter all that came since.
        Stopping leaves the law exact as long as `proceed` knows nothing of tokens that are not drafted yet.
        """
        if self.lag(tokens) >= self.context.prefill_rows:
            self.prefill(tokens)
        pending: Sequence[int] | mx.array = self._known(tokens[self.context.length :])
        narrower = self.context.vocabulary_size < self._vocabulary_size
        lazily = self.context.chains_cheaply if self.lazily is None else self.lazily
        drafted: list[mx.array] = []
        rows: list[mx.array] = []
        confidences: list[float] = []
        # As many keys whatever k is, so that no draw depends on it.
        for step_key in mx.random.split(key, MOST_DRAFT_TOKENS)[:k]:
            logits = self.context.extend(pending, rows=1)
            row = self._distribution(logits, seen)
            token = draw(row, step_key)  # (1,)
            if seen is not None:
                seen = seen.at[:, token].add(1)
            drafted.append(token)
            rows.append(row)
            pending = mx.minimum(token, self.context.vocabulary_size - 1) if narrower else token
            if proceed is not None:
                confidence = mx.exp(log_probabilities(logits, self._vocabulary_size).max())
                mx.eval(token, confidence)
                value: Any = confidence.item()
                confidences.append(value)
                if len(drafted) < k and not proceed(len(drafted), confidences):
                    break
            elif lazily:
                mx.async_eval(token)
            else:
                mx.eval(token)
        return Proposal(mx.concatenate(drafted), mx.concatenate(rows), tuple(confidences))

    def observe(self, tokens: Sequence[int]) -> None:
        """Forget drafts that are not in the committed `tokens`, which are never taken back."""
        self.context.rewind(min(self.context.length, len(tokens) - 1))
        self.context.settle(self.context.length)

    def close(self) -> None:
        self.context.close()

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Ids past this model's embedding become its last one: what it drafts then is only less likely accepted."""
        return [min(token, self.context.vocabulary_size - 1) for token in tokens]

    def _distribution(self, logits: mx.array, seen: mx.array | None) -> mx.array:
        missing = self._vocabulary_size - logits.shape[-1]
        if missing > 0:
            logits = mx.pad(logits, [(0, 0), (0, missing)], constant_values=float("-inf"))
        return distribution(logits, self._sampling, self._vocabulary_size, seen)
