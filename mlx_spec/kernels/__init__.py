"""The operations that attention needs of pages: a Metal kernel where there is one that is right here and the fastest,
else its twin. Without Metal nothing is checked or timed: the twin it is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_spec import remembered
from mlx_spec.kernels import reference, registry
from mlx_spec.kernels.choice import Choice
from mlx_spec.kernels.dispatch import Dispatch, pool_shape
from mlx_spec.kernels.self_check import SelfCheck

if TYPE_CHECKING:
    from mlx_spec.kv import PagePool

__all__ = ["memory", "on_this_machine", "paged_attention", "preferred", "quantize_kv"]


@functools.cache
def memory() -> remembered.Remembered:
    """What is known of the kernels on this machine."""
    folder = remembered.cache_folder()
    return remembered.Remembered(folder and folder / "kernels.json", remembered.machine())


@functools.cache
def on_this_machine() -> Dispatch:
    """What decides where there is Metal."""
    return Dispatch(SelfCheck(memory()), Choice(memory()))


def quantize_kv(
    keys: mx.array, values: mx.array, cosines: mx.array, sines: mx.array, divisors: mx.array, interleaved: bool
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """See `reference.quantize_kv`."""
    implementation = on_this_machine() if registry.available() else reference
    return implementation.quantize_kv(keys, values, cosines, sines, divisors, interleaved)


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
    """See `reference.paged_attention`."""
    implementation = on_this_machine() if registry.available() else reference
    return implementation.paged_attention(
        window_queries, sink_queries, keys, values, key_scales, value_scales, pages, state, dtype
    )


def preferred(
    pool: PagePool,
    rows: int,
    consecutive: bool,
    *,
    heads: int | None = None,
    length: int | None = None,
    batch: int = 1,
) -> bool:
    """Whether a kernel is to attend although the dense way could, being faster on this machine.

    heads: the model's query heads, without which nothing is measured and the dense way taken. length: positions to
    attend to, by default as many as the pool holds.
    """
    if heads is None or not registry.available():
        return False
    return on_this_machine().prefers_kernel(pool_shape(pool, rows, heads, length, batch), consecutive)
