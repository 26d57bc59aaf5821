"""A small language model that runs ahead of the target. Knows its own context; nothing of the target's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec.config import Sampling
from mlx_spec.context import Context, prefill
from mlx_spec.sampling import distribution, draw

_log = logging.getLogger("mlx_spec")


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens (k,) int32 and the distributions they were drawn from, (k, vocabulary_size)."""

    tokens: mx.array
    probabilities: mx.array


class DraftModel:
    """Drafts with a model of its own, under the same sampling settings as the target."""

    def __init__(
        self, context: Context, sampling: Sampling, vocabulary_size: int, context_length: int | None = None
    ) -> None:
        self.context = context
        self._sampling, self._vocabulary_size = sampling, vocabulary_size
        self._context_length = context_length
        self._told = False

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
            _log.warning(f"the draft's context of {self._context_length} tokens is full: plain decoding from here on")
        return max(0, self._context_length - length)

    def propose(self, tokens: Sequence[int], k: int, seen: mx.array | None, key: mx.array) -> Proposal:
        """Draft k tokens after the committed `tokens`.

        seen: how often each token is in `tokens`, (1, vocabulary_size), where the sampling settings need it.
        The first pass also reads what was committed since the last proposal: the newest token and, after a round
        that accepted everything, the last drafted one.
        """
        pending: Sequence[int] | mx.array = self._known(tokens[self.context.length :])
        narrower = self.context.vocabulary_size < self._vocabulary_size
        drafted, rows = [], []
        for step_key in mx.random.split(key, k):
            row = self._distribution(self.context.extend(pending, rows=1), seen)
            token = draw(row, step_key)  # (1,)
            if seen is not None:
                seen = seen.at[:, token].add(1)
            drafted.append(token)
            rows.append(row)
            pending = mx.minimum(token, self.context.vocabulary_size - 1) if narrower else token
            if self.context.chains_cheaply:
                mx.async_eval(token)
            else:
                mx.eval(token)
        return Proposal(mx.concatenate(drafted), mx.concatenate(rows))

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
