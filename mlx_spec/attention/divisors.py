"""What the channels of INT8 keys are divided by before they are rounded, and queries multiplied by in return. Knows
channels; nothing of pools or positions.

Both channels of a pair that is rotated together have the same divisor, so that rotation leaves it alone: the largest
length of the pair over some keys. No later key is cut off, since each has a scale of its own, but divisors from a
handful of tokens fit later keys badly, above all from the very first position, whose keys are unlike others. So the
runtime reads a fixed text first (`PagedModel.take_divisors`).
"""

from __future__ import annotations

import mlx.core as mx

_SMALLEST = 0.05
"""Of the mean over a head's channels. The first prompt may be short and leave a channel almost unused."""


def pair_lengths(keys: mx.array, interleaved: bool) -> mx.array:
    """keys (batch, kv_heads, n, head_dim) -> (kv_heads, head_dim) float32, both channels of a pair alike."""
    squares = mx.square(keys.astype(mx.float32))
    half = keys.shape[-1] // 2
    if interleaved:
        pairs = mx.unflatten(squares, -1, (half, 2)).sum(axis=-1)
    else:
        pairs = squares[..., :half] + squares[..., half:]
    lengths = mx.sqrt(pairs.max(axis=(0, 2)))  # (kv_heads, head_dim / 2)
    lengths = mx.maximum(lengths, _SMALLEST * lengths.mean(axis=-1, keepdims=True) + 1e-6)
    return mx.repeat(lengths, 2, axis=-1) if interleaved else mx.concatenate([lengths, lengths], axis=-1)


def multiplied(queries: mx.array, divisors: mx.array) -> mx.array:
    """queries (batch, heads, n, head_dim) times the divisors (kv_heads, head_dim) of the keys they meet."""
    kv_heads = divisors.shape[0]
    grouped = mx.unflatten(queries, 1, (kv_heads, -1)) * divisors[:, None, None]
    return mx.flatten(grouped, 1, 2).astype(queries.dtype)
