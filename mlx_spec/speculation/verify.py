"""Rejection sampling: which drafted tokens the target accepts, and the token it adds. Pure functions on the device."""

from __future__ import annotations

import mlx.core as mx

from mlx_spec.sampling import draw


def verify_tokenwise(
    target: mx.array, draft: mx.array, tokens: mx.array, key: mx.array
) -> tuple[mx.array, mx.array]:
    """Accept drafted tokens one by one and draw the token after the last accepted one.

    target (k + 1, vocabulary) and draft (k, vocabulary) distributions, tokens (k,) drawn from `draft`. Token i is
    accepted with probability min(1, target_i / draft_i); at the first rejection the next token comes from the
    normalised max(0, target - draft), after k acceptances from the target's last row. Emitted tokens then follow the
    target exactly: Leviathan et al. 2023 (appendix A.1) and Chen et al. 2023 (theorem 1).
    Returns (accepted (), next token (1,)), int32 both.
    """
    k = tokens.size
    accept_key, next_key = mx.random.split(key)
    columns = tokens[:, None]
    target_at = mx.take_along_axis(target[:k], columns, axis=-1)[:, 0]  # (k,)
    draft_at = mx.take_along_axis(draft, columns, axis=-1)[:, 0]  # (k,)
    uniform = mx.random.uniform(shape=(k,), key=accept_key)
    # The second test keeps rounding from ever rejecting a token the target likes at least as well.
    accepts = (uniform * draft_at < target_at) | (target_at >= draft_at)
    accepted = mx.cumprod(accepts.astype(mx.int32)).sum()
    target_row = mx.take(target, accepted, axis=0)
    # After the last draft nothing is left to subtract.
    draft_row = mx.where(accepted < k, mx.take(draft, mx.minimum(accepted, k - 1), axis=0), 0)
    residual = mx.maximum(target_row - draft_row, 0)
    # Where rounding leaves nothing of two equal rows, a rejection cannot have happened but by rounding too.
    residual = mx.where(residual.sum() > 0, residual, target_row)
    return accepted.astype(mx.int32), draw(residual[None], next_key)
