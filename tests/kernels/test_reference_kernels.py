"""The kernels' twins in plain MLX operations against their definitions in float64 numpy: pages in random order, several
tables, and no number in every slot that nothing may read."""

from __future__ import annotations

import random

import cache_positions
import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.attention.rotary import RotaryRows
from mlx_spec.kernels import reference
from mlx_spec.kv import PAGE

KV_HEADS, HEAD_DIM = 2, 16
FREQUENCIES = cache_positions.default_frequencies(HEAD_DIM)
TOLERANCE = {mx.float32: 2e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}
Array = np.ndarray


class Sequences:
    """Sequences of (length, sinks, window or None) with un-rotated queries, keys and values, and a pool that holds
    what a window leaves of them."""

    def __init__(
        self, shapes: list[tuple[int, int, int | None]], rows: int, group: int, storage: mx.Dtype, wrapped: bool = True
    ) -> None:
        chance, generator = random.Random(rows), np.random.default_rng(rows + group)
        pages = sum(-(-length // PAGE) for length, _, _ in shapes) + 2
        free = chance.sample(range(pages), pages)
        rotated = np.full((2, KV_HEADS, pages * PAGE, HEAD_DIM), np.nan)  # keys, values
        self.scales = None
        self.expected, tables, states, queries = [], [], [], []
        for length, sinks, window in shapes:
            first, head = length - rows, -(-sinks // PAGE)
            dropped = max(0, (first + 1 - window) // PAGE - head) if wrapped and window else 0
            table = [free.pop() for _ in range(-(-length // PAGE) - dropped)]
            keys, values = generator.standard_normal((2, KV_HEADS, length, HEAD_DIM))
            query = generator.standard_normal((KV_HEADS * group, rows, HEAD_DIM))
            turned = cache_positions.rotated(keys, np.arange(length), FREQUENCIES)
            if storage == mx.int8:  # what is stored is what both sides know
                turned, values = (np.round(20 * x) / 64 for x in (turned, values))
            else:
                turned, values = (np.array(mx.array(x).astype(storage).astype(mx.float32), np.float64)
                                  for x in (turned, values))
            keys = cache_positions.rotated(turned, -np.arange(length), FREQUENCIES)
            for position in range(length):
                index = position // PAGE
                if head <= index < head + dropped:
                    continue
                slot = table[index if index < head else index - dropped] * PAGE + position % PAGE
                rotated[0, :, slot], rotated[1, :, slot] = turned[:, position], values[:, position]
            self.expected.append(cache_positions.attention(
                query, keys, values, scale=HEAD_DIM**-0.5, frequencies=FREQUENCIES, sinks=sinks, window=window
            ))
            positions = np.arange(first, length)
            furthest = positions if window is None else np.minimum(positions, sinks + window - 1)
            queries.append([HEAD_DIM**-0.5 * cache_positions.rotated(query, at, FREQUENCIES)
                            for at in (positions, furthest)])
            tables.append(table)
            states.append([length, sinks, window or 2**30, head, dropped, 0, 0, 0])
        width = max(map(len, tables)) + 1
        self.pages = mx.array([table + [free[0]] * (width - len(table)) for table in tables], mx.int32)
        self.state = mx.array(states, mx.int32)
        self.queries = [mx.array(np.stack(part).astype(np.float32)) for part in zip(*queries, strict=True)]
        held = mx.array(rotated.astype(np.float32))
        if storage == mx.int8:
            missing = mx.isnan(held[..., 0])
            stored = mx.where(missing[..., None], 77, held * 64).astype(mx.int8)
            scales = mx.where(missing, mx.nan, 1 / 64).astype(mx.float16)
            self.pool = stored[0:1], stored[1:2], scales[0:1], scales[1:2]
        else:
            self.pool = held[0:1].astype(storage), held[1:2].astype(storage), None, None

    def check(self, dtype: mx.Dtype = mx.float32) -> None:
        actual = reference.paged_attention(*self.queries, *self.pool, self.pages, self.state, dtype)
        assert actual.dtype == dtype
        actual = np.array(actual.astype(mx.float32))
        np.testing.assert_allclose(actual, np.stack(self.expected), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("storage", [mx.float32, mx.bfloat16, mx.float16, mx.int8])
@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("group", [1, 2, 8])
def test_several_tables_attend_as_streaming_llm_does(storage: mx.Dtype, rows: int, group: int) -> None:
    """Whole, with a window that hides nothing yet, wrapped, with sinks that end within a page, and without sinks."""
    Sequences([
        (100, 0, None), (rows, 4, 65), (90, 4, 100), (400, 4, 65), (330, 70, 90), (500, 0, 128), (257, 64, 66),
    ], rows, group, storage).check()


@pytest.mark.parametrize("storage", [mx.float32, mx.int8])
@pytest.mark.parametrize("shape", [(1, 0, None), (64, 4, None), (65, 4, 65), (129, 4, 65), (700, 70, 300)])
def test_one_table_alone(storage: mx.Dtype, shape: tuple[int, int, int | None]) -> None:
    for wrapped in (False, True):
        Sequences([shape], 1, 2, storage, wrapped).check()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_result_is_of_the_models_type(dtype: mx.Dtype) -> None:
    Sequences([(300, 4, 100), (70, 0, None)], 3, 2, dtype).check(dtype)
    Sequences([(300, 4, 100)], 3, 2, mx.int8).check(dtype)


# Quantization.


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_quantization_rotates_divides_and_rounds(interleaved: bool, head_dim: int, dtype: mx.Dtype) -> None:
    generator = np.random.default_rng(head_dim)
    keys, values = (mx.array(generator.standard_normal((2, KV_HEADS, 5, head_dim))).astype(dtype) for _ in range(2))
    divisors = generator.uniform(0.1, 10, (KV_HEADS, head_dim)).astype(np.float32)
    frequencies, positions = cache_positions.default_frequencies(head_dim), np.array([[3, 9, 70, 71, 5000], range(5)])
    angles = positions[..., None] * frequencies
    if interleaved:
        cosines, signs = np.repeat(np.cos(angles), 2, -1), np.tile([-1, 1], head_dim // 2)
        sines = np.repeat(np.sin(angles), 2, -1) * signs
    else:
        cosines = np.concatenate([np.cos(angles)] * 2, -1)
        sines = np.concatenate([-np.sin(angles), np.sin(angles)], -1)
    rows = RotaryRows(mx.array(cosines.astype(np.float32)), mx.array(sines.astype(np.float32)), interleaved)
    results = reference.quantize_kv(keys, values, rows.cosines, rows.sines, mx.array(divisors), interleaved)
    assert [result.dtype for result in results] == [mx.int8, mx.float16] * 2
    exact_keys, exact_values = (np.array(x.astype(mx.float32), np.float64) for x in (keys, values))
    for index in range(2):
        exact_keys[index] = cache_positions.rotated(exact_keys[index], positions[index], frequencies, interleaved)
    exact_keys /= divisors[:, None]
    for exact, stored, scales in ((exact_keys, *results[:2]), (exact_values, *results[2:])):
        assert stored.shape == exact.shape
        assert scales.shape == exact.shape[:3]
        scale = np.array(scales, np.float64)[..., None]
        np.testing.assert_allclose(scale, np.abs(exact).max(-1, keepdims=True) / 127, rtol=6e-4)
        assert (np.abs(np.array(stored, np.float64) * scale - exact) <= 0.57 * scale).all()
        assert (np.abs(np.array(stored)).max(-1) >= 126).all()  # all bits are used


def test_rows_are_quantized_each_by_itself() -> None:
    x = mx.array([[127.0, -63.4, 0.6, 0], [0, 0, 0, 0], [-0.254, 0.002, 0, 0.127], [1e-12, 0, 0, 0]])
    rows, scales = reference.quantize_rows(x)
    assert rows.tolist() == [[127, -63, 1, 0], [0] * 4, [-127, 1, 0, 63], [0] * 4]
    np.testing.assert_allclose(np.array(scales), [1, 0, 0.002, 0], rtol=1e-3)


def test_a_large_pool_costs_a_small_window_nothing() -> None:
    """What is gathered is the window's pages: never a copy of a layer's whole array."""
    def peak(slots: int) -> int:
        keys, values = (mx.zeros((1, 2, slots, 64)) for _ in range(2))
        queries, pages = mx.ones((1, 4, 1, 64)), mx.arange(8, dtype=mx.int32)[None]
        state = mx.array([[500, 4, 100, 1, 0, 0, 0, 0]], mx.int32)
        mx.eval(keys, values, queries, pages, state)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(reference.paged_attention(queries, queries, keys, values, None, None, pages, state, mx.float32))
        return mx.get_peak_memory() - before

    assert peak(65536) < peak(1024) + 2**20
