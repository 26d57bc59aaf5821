"""INT8 of what is larger than any float16 scale can hold: cut off to finite numbers, by the kernel as by its twin."""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from kernel_problems import on_shim

from mlx_spec.kernels import reference, registry

Quantize = Callable[..., tuple[mx.array, ...]]
kernel: Quantize = functools.partial(registry.quantize_kv, execute=on_shim)

LARGEST_SCALE = float(np.finfo(np.float16).max)
SIZES = [
    127 * 65503.0, 127 * LARGEST_SCALE, 127 * 65519.0,  # the last one still rounds down to the largest float16
    127 * 65520.0, 1e9, 3e38, float("inf"),  # from here on a scale without a limit would be infinite
]  # fmt: skip
HEAD_DIM = 64


def large_rows(dtype: mx.Dtype) -> mx.array:
    """(1, 2, n, HEAD_DIM): in each row of ordinary numbers one or two of a size of SIZES; the second head mirrored."""
    rows = np.random.default_rng(0).standard_normal((len(SIZES), HEAD_DIM)).astype(np.float32)
    for row, size in enumerate(SIZES):
        rows[row, 5 * row] = size
        rows[row, -1 - row] = -size if row % 2 else 0
    return mx.array(np.stack([rows, -rows])[None]).astype(dtype)


def check(stored: mx.array, scales: mx.array, exact: mx.array) -> None:
    expected = np.array(exact.astype(mx.float32), np.float64)
    scale = np.array(scales, np.float64)[..., None]
    kept = np.array(stored, np.float64) * scale
    assert np.isfinite(scale).all()
    assert np.isfinite(kept).all()
    cut = np.clip(expected, -127 * scale, 127 * scale)
    assert (np.abs(kept - cut) <= 0.5 * scale).all()
    assert (scale <= LARGEST_SCALE).all()
    reached = np.abs(expected).max(-1) >= 127 * LARGEST_SCALE
    assert reached.any()
    assert (scale[..., 0][reached] == LARGEST_SCALE).all()


@pytest.mark.parametrize("quantize", [reference.quantize_kv, kernel], ids=["twin", "kernel"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_large_rows_are_cut_off(dtype: mx.Dtype, quantize: Quantize) -> None:
    values = large_rows(dtype)
    keys = mx.where(mx.abs(values) == mx.inf, mx.array(3e38, dtype), values)  # rotation makes no number of infinity
    angles = mx.zeros((1, len(SIZES), HEAD_DIM))
    arguments = (keys, values, mx.cos(angles), mx.sin(angles), mx.ones((2, HEAD_DIM)), False)
    results = quantize(*arguments)
    check(results[0], results[1], keys)
    check(results[2], results[3], values)
    for result, expected in zip(results, reference.quantize_kv(*arguments), strict=True):
        np.testing.assert_array_equal(np.array(result), np.array(expected))


@pytest.mark.parametrize("quantize", [reference.quantize_kv, kernel], ids=["twin", "kernel"])
def test_keys_that_overflow_while_they_are_rotated_and_divided_are_cut_off(quantize: Quantize) -> None:
    keys = mx.full((1, 1, 1, HEAD_DIM), 3e38)
    angles = mx.full((1, 1, HEAD_DIM), 0.5**0.5)  # cosines and sines of one sign: both halves grow
    arguments = (keys, keys, angles, angles, mx.full((1, HEAD_DIM), 0.1), False)
    results = quantize(*arguments)
    for stored, scales in (results[:2], results[2:]):
        assert (np.array(stored) == 127).all()
        assert scales.item() == LARGEST_SCALE


@pytest.mark.parametrize("quantize", [reference.quantize_kv, kernel], ids=["twin", "kernel"])
def test_infinity_in_half_precision_is_cut_off(quantize: Quantize) -> None:
    values = mx.array([65504, -mx.inf, 1] + [0] * (HEAD_DIM - 3), mx.float16).reshape(1, 1, 1, HEAD_DIM)
    still = mx.ones((1, 1, HEAD_DIM)), mx.zeros((1, 1, HEAD_DIM)), mx.ones((1, HEAD_DIM)), False
    arguments = (mx.zeros_like(values), values, *still)
    results = quantize(*arguments)
    assert results[2][0, 0, 0, :3].tolist() == [1, -127, 0]
    assert [results[1].item(), results[3].item()] == [0, LARGEST_SCALE]
