"""Logits -> distribution -> token. Pure functions of arrays; knows nothing of models, caches or speculation.

One function makes the target's distribution and the draft's, whatever the settings; greedy decoding is the
distribution with all its weight on the likeliest token, and of such rows only these tokens are kept. Every filter keeps
the tokens at or above some probability, so together they are one threshold, found without sorting the vocabulary.
Nothing here is compiled: MLX's CPU backend would build a library for every constant in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from mlx_spec.settings import Sampling


def distribution(
    logits: mx.array, sampling: Sampling, vocabulary_size: int, seen: mx.array | None = None
) -> mx.array:
    """The distribution that each row of `logits` stands for.

    logits (n, columns) of any floating type; seen (n, vocabulary_size) or (1, vocabulary_size), how often each token
    came before that row, needed where `sampling.penalises`. Columns past `vocabulary_size`, the padding of the
    embedding, are never sampled. Order: bias and penalties, temperature, top-k, top-p (of what top-k left), min-p.
    Returns (n, vocabulary_size) float32, rows summing to 1; where each row is certain (greedy), only its token, (n,)
    int32. A row that has no token left, or a logit that is no number, is NaN, or a token of -1; see `leave_tokens`.
    """
    logits = logits[:, :vocabulary_size].astype(mx.float32)
    if sampling.logit_bias:
        inside = [(token, bias) for token, bias in sampling.logit_bias.items() if token < vocabulary_size]
        tokens, biases = zip(*inside, strict=True) if inside else ((), ())
        logits = logits.at[:, mx.array(tokens, mx.int32)].add(mx.array(biases, mx.float32))
    if sampling.penalises:
        assert seen is not None
        logits = _penalised(logits, sampling, seen)
    if sampling.temperature == 0:
        best = mx.argmax(logits, axis=-1, keepdims=True).astype(mx.int32)
        return mx.where(mx.take_along_axis(logits, best, axis=-1) > -mx.inf, best, -1)[:, 0]
    # Subtracting the maximum first keeps a very low temperature finite.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / max(sampling.temperature, 1e-20)
    probabilities = mx.softmax(logits, axis=-1)
    threshold = _threshold(probabilities, sampling)
    if threshold is None:
        return probabilities
    kept = mx.where(probabilities >= threshold, probabilities, 0)
    return kept / kept.sum(axis=-1, keepdims=True)


def _penalised(logits: mx.array, sampling: Sampling, seen: mx.array) -> mx.array:
    """Repetition penalty (Keskar et al. 2019, CTRL, section 4.1), then presence and frequency penalties."""
    was_seen = seen > 0
    if sampling.repetition_penalty != 1:
        factor = sampling.repetition_penalty
        logits = mx.where(was_seen, mx.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - sampling.presence_penalty * was_seen - sampling.frequency_penalty * seen


def _threshold(probabilities: mx.array, sampling: Sampling) -> mx.array | None:
    """The least probability that every filter keeps, (n, 1), or None if nothing is filtered."""
    thresholds = []
    candidates = left = probabilities
    if 0 < sampling.top_k < probabilities.shape[-1]:
        k = sampling.top_k
        candidates = mx.partition(probabilities, -k, axis=-1)[:, -k:]  # (n, k)
        thresholds.append(candidates.min(axis=-1, keepdims=True))
        # More than k tokens, where some tie at the last place.
        left = mx.where(probabilities >= thresholds[0], probabilities, 0)
    if sampling.top_p < 1:
        # The lower bound keeps a tiny top-p above zero in float32: the likeliest token always stays.
        mass = max(sampling.top_p, 1e-20) * left.sum(axis=-1, keepdims=True)
        thresholds.append(_nucleus_threshold(candidates, mass))
    if sampling.min_p > 0:
        thresholds.append(sampling.min_p * probabilities.max(axis=-1, keepdims=True))
    if not thresholds:
        return None
    threshold = thresholds[0]
    for other in thresholds[1:]:
        threshold = mx.maximum(threshold, other)
    return threshold


_SORTED = 4096  # columns that are sorted sooner than searched
_SUMS = 128  # partial sums of a row: quicker than one after the other, and more exact


def _nucleus_threshold(probabilities: mx.array, mass: mx.array, digit: int | None = None) -> mx.array:
    """The greatest t for which the probabilities of t and more add up to at least `mass`, or 0; (n, 1).

    Non-negative floats order as their bits do: the 30 bits of t are found from the top, `digit` of them at a time, each
    of their values tried by a masked sum over the row. One at a time is the least work, three the least passes.
    """
    if digit is None and probabilities.shape[-1] <= _SORTED:
        ascending = mx.sort(probabilities, axis=-1)
        enough = mx.cumsum(ascending, axis=-1, reverse=True) >= mass
        return mx.where(enough, ascending, 0).max(axis=-1, keepdims=True)
    digit = digit or (3 if mx.default_device() == mx.Device(mx.gpu) else 1)
    padded = mx.pad(probabilities, [(0, 0), (0, -probabilities.shape[-1] % _SUMS)])
    padded = padded.reshape(len(padded), 1, _SUMS, -1)
    bits, steps = padded.view(mx.int32), mx.arange(1, 1 << digit)
    low = mx.zeros(mass.shape, mx.int32)  # holds: the mass of `low` and more suffices, or `low` is 0
    for position in range(30 - digit, -1, -digit):  # 1.0 is 0x3f800000: bits 0 to 29
        tried = low + steps * (1 << position)  # (n, values)
        sums = (padded * (bits >= tried[..., None, None])).sum(axis=-2).sum(axis=-1)
        low = low + (sums >= mass).sum(axis=-1, keepdims=True) * (1 << position)
    return low.view(mx.float32)


def leave_tokens(distributions: mx.array) -> mx.array:
    """Whether every row of what `distribution` gave has a token that can be drawn, ()."""
    return mx.all((distributions if distributions.ndim == 1 else distributions[:, 0]) >= 0)  # false for a NaN too


def draw(distributions: mx.array, key: mx.array) -> mx.array:
    """One token from each row of what `distribution` gives, (n,) int32. A token of probability 0 is never drawn."""
    if distributions.ndim == 1:
        return mx.maximum(distributions, 0)
    return mx.random.categorical(mx.log(distributions), axis=-1, key=key).astype(mx.int32)


def round_key(seed: int, committed: int) -> mx.array:
    """What all draws of the round after `committed` tokens come from."""
    return mx.random.key(int.from_bytes(blake2b(b"%d %d" % (seed, committed), digest_size=8).digest()))


def count_tokens(tokens: Sequence[int], vocabulary_size: int) -> mx.array:
    """How often each token occurs, (vocabulary_size,) float32."""
    inside = [token for token in tokens if token < vocabulary_size]
    return mx.array(np.bincount(inside, minlength=vocabulary_size).astype(np.float32))


def log_probabilities(logits: mx.array, vocabulary_size: int) -> mx.array:
    """The model's own log-probabilities, before any setting: (n, columns) -> (n, vocabulary_size) float32."""
    logits = logits[:, :vocabulary_size].astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
