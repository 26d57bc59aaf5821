"""Rejection sampling: which drafted tokens the target accepts, and the token it adds. Pure functions on the device.

Knows distributions and the drafted tokens; nothing of models, caches or who drafted. Both ways emit tokens that follow
the target exactly, given that each drafted token was drawn from its row of `draft` (a drafter that does not sample
gives rows with all their weight on its token). How many tokens are drafted may depend on those drafted before: whoever
stops may look at the tokens it hands over and at everything known before them, at the next row of the draft too, but
never at a token that was drawn and is then left out.

A target that is certain of every token (greedy) comes as these tokens alone, (k + 1,), and the draft is not looked at:
both ways accept up to the first token that differs.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.decoding.sampling import draw
from mlx_spec.settings import MOST_DRAFT_TOKENS


def verify_tokenwise(target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """Accept drafted tokens one by one and draw the token after the last accepted one.

    target (k + 1, vocabulary) and draft (k, vocabulary) distributions, tokens (k,) drawn from `draft`. Token i is
    accepted with probability min(1, target_i / draft_i); at the first rejection the next token comes from the
    normalised max(0, target - draft), after k acceptances from the target's last row. Emitted tokens then follow the
    target exactly: Leviathan et al. 2023 (appendix A.1) and Chen et al. 2023 (theorem 1).
    Returns (accepted (), next token (1,)), int32 both.
    """
    if target.ndim == 1:
        return _verify_certain(target, tokens)
    accept_key, next_key = mx.random.split(key)
    target_at, draft_at = _probabilities_of(tokens, target, draft)
    uniform = mx.random.uniform(shape=(MOST_DRAFT_TOKENS,), key=accept_key)[: tokens.size]  # the same whatever k is
    # The second test keeps rounding from ever rejecting a token the target likes at least as well.
    accepts = (uniform * draft_at < target_at) | (target_at >= draft_at)
    accepted = mx.cumprod(accepts.astype(mx.int32)).sum()
    return accepted.astype(mx.int32), _draw_next(target, draft, accepted, mx.array(1.0), next_key)


def verify_block(target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array) -> tuple[mx.array, mx.array]:
    """Accept drafted tokens all together: never fewer on average than one by one, and the most that can be.

    Arguments and result as for `verify_tokenwise`. Sun et al. 2024, "Block verification accelerates speculative
    decoding", algorithm 2: a token that the target likes better than the draft did makes up for one before it that
    it liked less, so that a rejection is not final while drafts follow.

    weight_i = min(1, weight_{i-1} * target_i / draft_i) is the probability, given the first i drafts, that at least i
    are accepted. It holds at the last draft because that one is accepted so often, and before it because i are
    accepted, where no longer prefix is, with probability left_i / (left_i + 1 - weight_i), where left_i is the mass of
    max(0, weight_i * target - draft) in the row after them, from which the next token then comes. With one draft, and
    with drafts that were not sampled, the law is that of `verify_tokenwise`.
    """
    if target.ndim == 1:
        return _verify_certain(target, tokens)
    k = tokens.size
    accept_key, next_key = mx.random.split(key)
    target_at, draft_at = _probabilities_of(tokens, target, draft)
    # The recurrence is a walk held below zero: each height is the free walk's less the highest it has been.
    walk = mx.cumsum(mx.concatenate([mx.zeros((1,)), mx.log(target_at) - mx.log(draft_at)]))  # (k + 1,)
    weight = mx.exp(walk - mx.cummax(walk))  # (k + 1,), the first is 1
    left = mx.maximum(weight[1:k, None] * target[1:k] - draft[1:], 0).sum(axis=-1)  # (k - 1,)
    # Before a row of the draft that is no distribution the target is on its own, as `_draw_next` has it: all is left.
    left = mx.where(mx.isnan(left), weight[1:k], left)
    left = mx.concatenate([left, weight[k:]])  # (k,): nothing is to be subtracted after the last draft
    uniform = mx.random.uniform(shape=(MOST_DRAFT_TOKENS,), key=accept_key)[:k]
    # 0 < 0 where the row after a prefix is the draft's own: then what is drafted next is accepted, and the prefix too.
    accepts = uniform * (left + 1 - weight[1:]) < left
    accepted = mx.where(accepts, mx.arange(1, k + 1), 0).max()
    next_token = _draw_next(target, draft, accepted, mx.take(weight, accepted, axis=0), next_key)
    return accepted.astype(mx.int32), next_token


def _verify_certain(target: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
    accepted = mx.cumprod((target[: tokens.size] == tokens).astype(mx.int32)).sum().astype(mx.int32)
    return accepted, mx.take(target, accepted, axis=0)[None]


def _probabilities_of(tokens: mx.array, target: mx.array, draft: mx.array) -> tuple[mx.array, mx.array]:
    """What the target and the draft gave each drafted token, (k,) both."""
    columns = tokens[:, None]
    target_at = mx.take_along_axis(target[: tokens.size], columns, axis=-1)[:, 0]
    return target_at, mx.take_along_axis(draft, columns, axis=-1)[:, 0]


def _draw_next(target: mx.array, draft: mx.array, accepted: mx.array, weight: mx.array, key: mx.array) -> mx.array:
    """The token after the accepted ones, (1,): of the target after all drafts, else of max(0, weight * p - q)."""
    k = draft.shape[0]
    target_row = mx.take(target, accepted, axis=0)
    draft_row = mx.take(draft, mx.minimum(accepted, k - 1), axis=0)
    residual = mx.where(accepted < k, mx.maximum(weight * target_row - draft_row, 0), target_row)
    # Where rounding leaves nothing of two equal rows, a rejection cannot have happened but by rounding too.
    residual = mx.where(residual.sum() > 0, residual, target_row)
    return draw(residual[None], key)
