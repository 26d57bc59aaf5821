"""The twin of each Metal kernel in plain MLX operations: the same arrays in and out, on any backend.

They are the reference that kernels are checked against, and the way to attend where there is no kernel. Accumulation
is float32 throughout.

Conventions shared with metal/*.metal. A pool has keys and values (1, kv_heads, slots, head_dim), slot = page * 64 +
offset; an INT8 pool also has their scales (1, kv_heads, slots) float16, one per token and head. `pages` (batch, P)
int32 lists the pages each sequence still has, in order. `state` (batch, 8) int32 says per sequence: its length with
the new rows, sinks, window, the pages before the dropped ones, how many were dropped, and three zeros. Query row i of
n is at position p = length - n + i and sees position j when j <= p and (j < sinks or j > p - window). Queries are
float32 and have been multiplied by the softmax scale and, for INT8, by the divisors of the keys' channels.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from mlx_spec.kv import PAGE, of_pages

LENGTH, SINKS, WINDOW, HEAD_PAGES, DROPPED_PAGES = range(5)
"""Columns of `state`."""
EVERYTHING = 2**30
"""As a window: no position is hidden."""
STATE_COLUMNS = 8
LARGEST_SCALE = 65504
"""The largest float16."""
HIDDEN = -1e30
"""Score of what a row must not see: finite, so that a row of nothing else gives no NaN."""


def paired(x: mx.array, interleaved: bool) -> mx.array:
    """What is turned together: (..., head_dim) as (..., head_dim / 2, 2), neighbours, if interleaved, else as
    (..., 2, head_dim / 2)."""
    return mx.unflatten(x, -1, (-1, 2) if interleaved else (2, -1))


def rotate(x: mx.array, cosines: mx.array, sines: mx.array, interleaved: bool) -> mx.array:
    """x (..., n, head_dim) with each pair of channels turned, by cosines and sines that are `paired` already."""
    pairs = paired(x, interleaved)
    swapped = pairs[..., ::-1] if interleaved else pairs[..., ::-1, :]  # a view, which costs no copy
    return mx.flatten(_turned(pairs, swapped, cosines, sines), -2)


@functools.partial(mx.compile, shapeless=True)
def _turned(x: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    """One kernel instead of four: every layer of every pass does this."""
    return (x * cosines + swapped * sines).astype(x.dtype)


def quantize_kv(
    keys: mx.array, values: mx.array, cosines: mx.array, sines: mx.array, divisors: mx.array, interleaved: bool
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Rotate and divide new keys, then round them and the values to INT8, symmetrically, per token and head.

    keys, values (batch, kv_heads, n, head_dim); cosines, sines (batch, n, head_dim) float32 as in
    `mlx_spec.attention.rotary.RotaryRows`; divisors (kv_heads, head_dim) float32.
    Returns keys and values (batch, kv_heads, n, head_dim) int8 and their scales (batch, kv_heads, n) float16, in the
    order keys, key scales, values, value scales.
    """
    cosines, sines = paired(cosines[:, None], interleaved), paired(sines[:, None], interleaved)
    rotated = rotate(keys.astype(mx.float32), cosines, sines, interleaved)
    quantized_keys, key_scales = quantize_rows(rotated / divisors[None, :, None])
    quantized_values, value_scales = quantize_rows(values.astype(mx.float32))
    return quantized_keys, key_scales, quantized_values, value_scales


def quantize_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    """x (..., head_dim) -> (int8 of the same shape, float16 scales (...)), x being about int8 * scale.

    The float16 scale is what the values are divided by, so its rounding costs nothing; a row of zeros has scale 0, and
    what even the largest scale cannot reach is cut off.
    """
    scales = mx.minimum(mx.abs(x).max(axis=-1, keepdims=True) / 127, LARGEST_SCALE).astype(mx.float16)
    safe = mx.where(scales > 0, scales, 1).astype(mx.float32)
    return mx.clip(mx.round(x / safe), -127, 127).astype(mx.int8), scales[..., 0]


def paged_attention(
    window_queries: mx.array,
    sink_queries: mx.array,
    keys: mx.array,
    values: mx.array,
    key_scales: mx.array | None,
    value_scales: mx.array | None,
    pages: mx.array,
    state: mx.array,
    dtype: mx.Dtype,
) -> mx.array:
    """Attention of n rows per sequence over its pages.

    window_queries, sink_queries (batch, heads, n, head_dim) float32: the same queries rotated for the keys of the
    window and for those of the sinks. Returns (batch, heads, n, head_dim) in `dtype`.
    """
    batch, heads, n, head_dim = window_queries.shape
    kv_heads, count = keys.shape[1], pages.shape[1] * PAGE
    index = mx.arange(pages.shape[1])
    logical = index + mx.where(index >= state[:, HEAD_PAGES, None], state[:, DROPPED_PAGES, None], 0)  # (batch, P)
    positions = (logical[:, :, None] * PAGE + mx.arange(PAGE)).reshape(batch, 1, 1, 1, count)

    def gathered(array: mx.array, scales: mx.array | None) -> mx.array:
        """(batch, kv_heads, 1, count, head_dim) float32"""
        rows = mx.concatenate([of_pages(array, pages[b]) for b in range(batch)]).astype(mx.float32)
        if scales is not None:
            rows *= mx.concatenate([of_pages(scales, pages[b]) for b in range(batch)])[..., None]
        return rows[:, :, None]

    def grouped(queries: mx.array) -> mx.array:
        return queries.reshape(batch, kv_heads, heads // kv_heads, n, head_dim)

    columns = [state[:, column].reshape(batch, 1, 1, 1, 1) for column in (LENGTH, SINKS, WINDOW)]
    length, sinks, window = columns
    rows = length - n + mx.arange(n)[:, None]  # (batch, 1, 1, n, 1): the queries' positions
    all_keys = gathered(keys, key_scales).swapaxes(-1, -2)
    scores = mx.where(positions < sinks, grouped(sink_queries) @ all_keys, grouped(window_queries) @ all_keys)
    visible = (positions <= rows) & ((positions < sinks) | (positions > rows - window))
    weights = mx.softmax(mx.where(visible, scores, HIDDEN), axis=-1)  # (batch, kv_heads, group, n, count)
    # A slot past the length may hold anything, and 0 times NaN is NaN.
    all_values = mx.where((positions < length).swapaxes(-1, -2), gathered(values, value_scales), 0)
    return (weights @ all_values).reshape(batch, heads, n, head_dim).astype(dtype)
