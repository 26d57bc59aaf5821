"""Attention through a window as StreamingLLM defines it (Xiao et al. 2024): every key is rotated at its position inside
the cache, anew for each query. float64 numpy; knows nothing of pages, or of how the code under test avoids this."""

from __future__ import annotations

import numpy as np

Array = np.ndarray
THETA = 10000.0


def default_frequencies(head_dim: int, theta: float = THETA) -> Array:
    """Radians per position, (head_dim / 2,)."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def rotated(x: Array, positions: Array, frequencies: Array, interleaved: bool = False) -> Array:
    """Su et al. 2021. x and result (..., n, head_dim); positions (n,)."""
    angles = np.asarray(positions, np.float64)[:, None] * frequencies  # (n, head_dim / 2)
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    one = first * np.cos(angles) - second * np.sin(angles)
    two = first * np.sin(angles) + second * np.cos(angles)
    return np.stack([one, two], -1).reshape(x.shape) if interleaved else np.concatenate([one, two], -1)


def seen(position: int, sinks: int, window: int | None) -> Array:
    """The positions that the row at `position` sees, in order."""
    if window is None:
        return np.arange(position + 1)
    return np.array([j for j in range(position + 1) if j < sinks or j > position - window])


def attention(
    queries: Array, keys: Array, values: Array, *, scale: float, frequencies: Array, sinks: int = 0,
    window: int | None = None, interleaved: bool = False,
) -> Array:
    """The last n rows of a sequence: queries (heads, n, head_dim), keys and values (kv_heads, length, head_dim), none
    of them rotated. Result (heads, n, head_dim)."""
    heads, n, _ = queries.shape
    group, length = heads // keys.shape[0], keys.shape[1]
    result = np.zeros(queries.shape)
    for row in range(n):
        visible = seen(length - n + row, sinks, window)
        inside = np.arange(len(visible))
        cached = rotated(keys[:, visible], inside, frequencies, interleaved)
        query = rotated(queries[:, row : row + 1], inside[-1:], frequencies, interleaved)
        for head in range(heads):
            scores = scale * query[head] @ cached[head // group].T  # (1, visible)
            weights = np.exp(scores - scores.max())
            result[head, row] = (weights / weights.sum() @ values[head // group][visible])[0]
    return result
