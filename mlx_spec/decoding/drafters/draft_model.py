"""A small language model that runs ahead of the target. Knows its own context; nothing of the target's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_spec.architectures.context import Context, LanguageModel, prefill
from mlx_spec.decoding.drafters.protocol import Proceed, Proposal
from mlx_spec.decoding.sampling import distribution, draw, log_probabilities
from mlx_spec.decoding.schedule.acceptance import Acceptance
from mlx_spec.decoding.schedule.costs import Costs
from mlx_spec.decoding.schedule.offers import SURENESS, Offer, Outlook
from mlx_spec.settings import MODEL, MOST_AUTO_DRAFT_TOKENS, MOST_DRAFT_TOKENS, SMALLEST_WINDOW, Sampling

_log = logging.getLogger("mlx_spec")
# As likely by chance as not is a match of fewer tokens: a draft model does better.
_PREFERENCE = 2.5
_TELLING_PROMPT = 16
"""Tokens whose reading says what reading a token costs."""


def draft_context(model: LanguageModel, context_length: int | None, sinks: int, window: int | None) -> Context | None:
    """An empty context to draft in beside a target with these sinks and this window; None where the model has no room.

    What a draft sees beside a window is its own affair: as much of that as its own context, of `context_length`
    positions, allows."""
    if window is not None and context_length is not None:
        window = min(window, context_length - sinks)
        if window < SMALLEST_WINDOW:
            return None
    return model.new_context(sinks, window)


def model_offer(room: int, lag: int = 0) -> Offer:
    """Kinds are positions."""
    return Offer(MODEL, range(room), lag, _PREFERENCE)


class Reading:
    """What reading a token costs a draft model, as its prompt showed."""

    seconds = 0.0

    def price(self, costs: Costs) -> tuple[float, float]:
        """See `Outlook.price`: where no step was timed yet, reading costs what it did in the prompt."""
        return costs.draft, costs.catching_up if costs.draft_step is not None else self.seconds / costs.plain


def model_outlook(reading: Reading | None = None) -> Outlook:
    """Of a small model of a large one's family: mostly 0.6 to 0.9 are accepted."""
    positions = Acceptance([0.0] * MOST_AUTO_DRAFT_TOKENS, accepted=2.8, rejected=0.9, hopeless=0.05)
    sureness = Acceptance(SURENESS, accepted=2.8, rejected=0.9, hopeless=0.05, slopes=(0.0, 0.5, 1.0))
    return Outlook(MODEL, positions, range(MOST_AUTO_DRAFT_TOKENS), sureness, (reading or Reading()).price)


class DraftModel:
    """Drafts with a model of its own, under the same sampling settings as the target."""

    name = MODEL

    def __init__(
        self, context: Context, sampling: Sampling, vocabulary_size: int, context_length: int | None = None
    ) -> None:
        self.context = context
        self._sampling, self._vocabulary_size = sampling, vocabulary_size
        self._context_length = context_length
        self._told = False
        self._reading = Reading()
        self._lazily: bool | None = None
        """Whether a step is built on the one before while that is still in flight; None is where that is cheap, which
        changes as the cache grows. Not asked where the draft stops early: then each token is waited for."""
        self.outlook = model_outlook(self._reading)

    @property
    def can_rewind(self) -> bool:
        return self.context.can_rewind

    @property
    def nbytes(self) -> int:
        return self.context.nbytes

    def adapt(self, costs: Costs) -> None:
        # Where a chain was measured as faster though it copies the cache, it is. What is cheap now may not be so once
        # the cache has grown.
        self._lazily = True if costs.draft_chained and not self.context.chains_cheaply else None

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Read all of `tokens` but the last, if the draft can go on from there."""
        if self.reads(len(tokens)):
            self.context.reserve(len(tokens))
            started, before = perf_counter(), self.context.length
            try:
                prefill(self.context, self._known(tokens), progress)
            finally:  # also where progress ends it, to go on later
                if (read := self.context.length - before) >= _TELLING_PROMPT:
                    self._reading.seconds = (perf_counter() - started) / read

    def reads(self, length: int) -> bool:
        """Whether the draft's own context reaches that far: `prefill` does nothing otherwise."""
        return self._context_length is None or length <= self._context_length

    def offer(self, tokens: Sequence[int], most: int) -> Offer | None:
        """Says so once when the draft's context ends."""
        if self._context_length is not None and len(tokens) + most > self._context_length:
            most = self._context_length - len(tokens)
            if most <= 0 and not self._told:
                self._told = True
                length = self._context_length
                _log.warning(f"the draft's context of {length} tokens is full: no drafts by it from here on")
        return model_offer(most, self.lag(tokens)) if most > 0 else None

    def lag(self, tokens: Sequence[int]) -> int:
        """How many of the committed `tokens`, the newest aside, it has yet to read."""
        return len(tokens) - 1 - self.context.length

    def propose(
        self, tokens: Sequence[int], k: int, seen: mx.array | None, key: mx.array, proceed: Proceed | None = None
    ) -> Proposal:
        """The first pass also reads what was committed since the last proposal: the newest token and, after a round
        that accepted everything, the last drafted one; after rounds without this drafter all that came since."""
        started = perf_counter()
        if self.lag(tokens) >= self.context.prefill_rows:
            self.prefill(tokens)
        pending: Sequence[int] | mx.array = self._known(tokens[self.context.length :])
        narrower = self.context.vocabulary_size < self._vocabulary_size
        lazily = proceed is None and (self.context.chains_cheaply if self._lazily is None else self._lazily)
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
        seconds = None if lazily else perf_counter() - started
        return Proposal(mx.concatenate(drafted), mx.concatenate(rows), tuple(confidences), seconds)

    def rewind(self, tokens: Sequence[int]) -> None:
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
