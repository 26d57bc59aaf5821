"""Keys and values in INT8: how many bits, how large an error, and which divisors, from a pass of attention up to the
logits of tiny models."""

from __future__ import annotations

from typing import Any

import cache_positions
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope
from tiny import tiny_module

from mlx_spec.architectures.paged import PagedModel
from mlx_spec.attention.choosing import attention_pass
from mlx_spec.attention.rotary import Rotary
from mlx_spec.kernels import reference
from mlx_spec.kv import PAGE, PagePool, PageTable

HEAD_SIZES = [64, 80, 96, 128, 256]
Array = np.ndarray


class Layer:
    """One layer of INT8 attention on one sequence, and the exact keys (rotated) and values that were written."""

    def __init__(self, head_dim: int, interleaved: bool = False, dtype: mx.Dtype = mx.float32) -> None:
        kv_heads = 2
        self.pool = PagePool(layers=1, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, int8=True)
        self.table = PageTable(self.pool)
        self.interleaved = interleaved
        self.rotary = Rotary(initialize_rope(head_dim, cache_positions.THETA, interleaved), head_dim)
        self.keys = self.values = np.zeros((kv_heads, 0, head_dim))

    def append(self, keys: Array, values: Array) -> None:
        """keys, values (kv_heads, n, head_dim) float32, keys not yet rotated."""
        rows, start = keys.shape[1], self.table.length
        self.table.append(rows)
        attention = attention_pass(self.pool, [self.table], rows, self.rotary, len(keys))
        arguments = [mx.array(x, dtype=mx.float32)[None].astype(self.pool.dtype) for x in (keys, keys, values)]
        attention.attend(0, *arguments, 1.0)
        keys, values = (np.array(x[0].astype(mx.float32), np.float64) for x in arguments[1:])
        frequencies = cache_positions.default_frequencies(self.pool.head_dim)
        turned = cache_positions.rotated(keys, start + np.arange(rows), frequencies, self.interleaved)
        self.keys = np.concatenate([self.keys, turned], axis=1)
        self.values = np.concatenate([self.values, values], axis=1)

    @property
    def divisors(self) -> Array:
        """(kv_heads, 1, head_dim)"""
        assert self.pool.divisors[0] is not None
        return np.array(self.pool.divisors[0], np.float64)[:, None]

    def stored(self) -> tuple[Array, Array, Array, Array]:
        """Keys (still divided) and values as they can be read, and their scales (kv_heads, n, 1)."""
        slots = mx.array([self.table.slot(position) for position in range(self.table.length)])
        key_scales, value_scales = self.pool.key_scales, self.pool.value_scales
        assert key_scales is not None
        assert value_scales is not None
        found = []
        for rows, scales in ((self.pool.keys, key_scales), (self.pool.values, value_scales)):
            scale = np.array(mx.take(scales[0][0], slots, axis=1), np.float64)[..., None]
            found += [np.array(mx.take(rows[0][0], slots, axis=1), np.float64) * scale, scale]
        return found[0], found[1], found[2], found[3]

    def check(self) -> None:
        """No channel is off by more than half a step, and what the scale's own rounding adds."""
        keys, key_scales, values, value_scales = self.stored()
        for exact, read, scales in (
            (self.keys / self.divisors, keys, key_scales), (self.values, values, value_scales)
        ):
            largest = np.abs(exact).max(-1, keepdims=True)
            slack = 127 * np.maximum(2**-11 * scales, 2**-25) + 1e-6 * largest  # the last is float32's
            assert (np.abs(exact - read) <= scales / 2 + slack).all()
            np.testing.assert_allclose(scales, largest / 127, rtol=2**-10, atol=2**-24)


def noise(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# Bits.


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_an_element_takes_eight_bits_and_its_part_of_a_scale(head_dim: int, dtype: mx.Dtype) -> None:
    pool = PagePool(layers=3, kv_heads=2, head_dim=head_dim, dtype=dtype, int8=True)
    PageTable(pool).append(5 * PAGE)
    elements = 2 * 3 * 2 * pool.pages * PAGE * head_dim
    assert pool.nbytes * 8 == elements * (8 + 16 / head_dim)
    assert pool.key_scales is not None
    assert pool.value_scales is not None
    kinds = (pool.keys, pool.key_scales, pool.values, pool.value_scales)
    assert pool.nbytes == sum(array.nbytes for kind in kinds for array in kind)
    assert pool.page_bytes * pool.pages == pool.nbytes


def test_llama_70b_takes_what_the_readme_says() -> None:
    shape: dict[str, Any] = {"layers": 80, "kv_heads": 8, "head_dim": 128, "dtype": mx.float16}
    assert PagePool(**shape).page_bytes == 320 * 1024 * PAGE
    assert PagePool(**shape, int8=True).page_bytes == 162.5 * 1024 * PAGE


# Errors.


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_round_trip_is_off_by_half_a_step(head_dim: int, interleaved: bool, dtype: mx.Dtype) -> None:
    layer = Layer(head_dim, interleaved, dtype=dtype)
    for seed, rows in enumerate((40, 1, 3, 90)):
        layer.append(noise(seed, 2, rows, head_dim), noise(seed + 10, 2, rows, head_dim))
    layer.check()


def test_rows_of_zeros_stay_zeros() -> None:
    layer = Layer(64)
    layer.append(np.zeros((2, 3, 64)), np.zeros((2, 3, 64)))
    layer.append(noise(0, 2, 3, 64), noise(1, 2, 3, 64))
    layer.append(np.zeros((2, 2, 64)), np.zeros((2, 2, 64)))
    keys, key_scales, values, value_scales = layer.stored()
    for array in (keys, key_scales, values, value_scales):
        assert np.isfinite(array).all()
        assert (array[:, [0, 1, 2, 6, 7]] == 0).all()
        assert (array[:, 3:6] != 0).any(-1).all()


@pytest.mark.parametrize("exponent", [-20, -6, -3, 0, 3, 6])
def test_values_of_any_size_are_kept(exponent: int) -> None:
    layer = Layer(64)
    layer.append(noise(0, 2, 40, 64), noise(1, 2, 40, 64))
    for rows, seed in ((1, 2), (30, 3)):
        layer.append(noise(seed, 2, rows, 64), noise(seed + 5, 2, rows, 64, scale=10.0**exponent))
    layer.check()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e3, 1e15])
def test_keys_of_any_size_are_kept(size: float) -> None:
    """The first keys say what is usual, so also a pool of very small or large keys uses all of its bits."""
    layer = Layer(64)
    layer.append(noise(0, 2, 40, 64, scale=size), noise(1, 2, 40, 64))
    layer.append(noise(2, 2, 1, 64, scale=size), noise(3, 2, 1, 64))
    keys = layer.stored()[0] * layer.divisors
    if size > 1e-20:  # below, they cannot be told from zero beside any query
        layer.check()
        assert np.abs(keys - layer.keys).max() < 0.03 * size
    assert np.isfinite(keys).all()
    assert np.abs(keys - layer.keys).max() <= 0.03 * max(size, 1e-6)


@pytest.mark.parametrize("size", [1e9, 1e30])
def test_what_a_scale_cannot_hold_is_cut_off(size: float) -> None:
    x = mx.array([[size, -size, 1.0, 0.0]])
    rows, scales = reference.quantize_rows(x)
    assert rows.tolist() == [[127, -127, 0, 0]]
    assert scales.item() == 65504


# Divisors.


def with_outliers(seed: int, kv_heads: int, rows: int, head_dim: int) -> Array:
    """Keys as Qwen2.5 has them: a bias makes a few channels of each head far larger than all others, one channel of a
    pair more than the other."""
    keys = noise(seed, kv_heads, rows, head_dim)
    keys[..., 3] += 120
    keys[..., head_dim // 2 + 9] -= 60
    keys[..., head_dim - 1] += 250
    return keys


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_outlier_channels_do_not_cost_the_others_their_bits(head_dim: int, interleaved: bool) -> None:
    layer = Layer(head_dim, interleaved)
    for seed, rows in enumerate((60, 1, 30)):
        layer.append(with_outliers(seed, 2, rows, head_dim), noise(seed, 2, rows, head_dim))
    layer.check()
    keys = layer.stored()[0] * layer.divisors
    plain, scales = reference.quantize_rows(mx.array(layer.keys.astype(np.float32)))
    unscaled = np.array(plain, np.float64) * np.array(scales, np.float64)[..., None]
    queries = noise(9, 2, 16, head_dim)

    def error(read: Array) -> float:
        """Of the scores of queries whose channels are all alike, as a root mean square."""
        return float(np.sqrt(np.mean((queries @ (read - layer.keys).transpose(0, 2, 1)) ** 2)))

    assert error(keys) < error(unscaled) / 5


@pytest.mark.parametrize("interleaved", [False, True])
def test_divisors_are_the_lengths_of_the_pairs_that_rotate_together(interleaved: bool) -> None:
    layer = Layer(64, interleaved)
    keys = with_outliers(0, 2, 50, 64)
    layer.append(keys, noise(1, 2, 50, 64))
    half = 32
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    lengths = np.array([np.hypot(keys[..., a], keys[..., b]).max(-1) for a, b in pairs])  # (pairs, kv_heads)
    for (one, two), length in zip(pairs, lengths, strict=True):
        np.testing.assert_array_equal(layer.divisors[..., one], layer.divisors[..., two])
        if (length > 0.1 * lengths.mean(0)).all():
            np.testing.assert_allclose(layer.divisors[:, 0, one], length, rtol=1e-5)
        assert (layer.divisors[:, 0, one] >= 0.999 * length).all()


def test_divisors_are_frozen_after_the_first_pass() -> None:
    layer = Layer(64)
    layer.append(noise(0, 2, 5, 64), noise(0, 2, 5, 64))
    before = layer.divisors
    layer.append(with_outliers(1, 2, 50, 64), noise(0, 2, 50, 64))
    np.testing.assert_array_equal(layer.divisors, before)
    layer.table.rewind(0)
    layer.keys, layer.values = layer.keys[:, :0], layer.values[:, :0]
    layer.append(noise(0, 2, 5, 64), noise(0, 2, 5, 64))
    np.testing.assert_array_equal(layer.divisors, before)


def test_a_first_prompt_of_one_token_only_costs_evenness() -> None:
    """Outliers that come later are rounded like any other channel of their row, never cut off."""
    layer = Layer(128)
    first = noise(0, 2, 1, 128)
    first[..., :70] *= 1e-4  # channels that the first token leaves almost unused
    layer.append(first, noise(1, 2, 1, 128))
    layer.append(with_outliers(2, 2, 80, 128), noise(3, 2, 80, 128))
    layer.check()
    keys = layer.stored()[0] * layer.divisors
    largest = np.abs(layer.keys).max(-1, keepdims=True)
    # The largest divisor over the smallest is bounded, and so is what one channel can cost another.
    assert layer.divisors.max() / layer.divisors.min() <= 128 / 2 / 0.05
    assert np.isfinite(keys).all()
    assert np.sqrt(np.mean((keys - layer.keys) ** 2)) < 0.02 * largest.mean()


# Tiny models.


def logits(model: PagedModel, tokens: list[int], first: int) -> Array:
    context = model.new_context()
    rows = [np.array(context.extend(tokens[:first]))]
    rows += [np.array(context.extend(tokens[start : start + 5])) for start in range(first, len(tokens), 5)]
    context.close()
    return np.concatenate(rows).astype(np.float64)


@pytest.mark.parametrize("first", [60, 1])
@pytest.mark.parametrize("changes", [
    {"head_dim": 64}, {"head_dim": 80}, {"head_dim": 96, "num_key_value_heads": 4}, {"head_dim": 128},
    {"head_dim": 256, "num_key_value_heads": 1}, {"head_dim": 64, "rope_traditional": True},
    {"head_dim": 64, "model_type": "qwen2"}, {"head_dim": 64, "model_type": "qwen3"},
], ids=str)
def test_logits_hardly_change(changes: dict[str, Any], first: int) -> None:
    module = tiny_module(0, 0.15, **changes)
    tokens = np.random.default_rng(0).integers(0, 40, 151).tolist()
    exact = logits(PagedModel(module), tokens, first)
    rounded = logits(PagedModel(module, int8=True), tokens, first)
    assert np.abs(rounded - exact).max() > 0

    def log_softmax(x: Array) -> Array:
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(exact), log_softmax(rounded)
    assert (np.exp(p) * (p - q)).sum(-1).mean() < 3e-4
    assert (exact.argmax(-1) == rounded.argmax(-1)).mean() > 0.95


def test_a_fork_and_a_rewind_read_what_was_written() -> None:
    module = tiny_module(0, 0.5)
    model = PagedModel(module, int8=True)
    tokens = np.random.default_rng(0).integers(0, 40, 120).tolist()
    parent = model.new_context()
    parent.extend(tokens[:100])
    child = parent.fork()
    child.extend([1, 2, 3])
    child.rewind(100)
    a, b = (np.array(context.extend(tokens[100:])) for context in (child, parent))
    np.testing.assert_array_equal(a, b)
    child.rewind(60)
    parent.close()
    np.testing.assert_allclose(np.array(child.extend(tokens[60:]))[-20:], a, atol=1e-4, rtol=0)
    child.close()
    assert model.pool.pages_in_use == 0


def test_a_long_prefill_peaks_below_that_of_sixteen_bits() -> None:
    module = tiny_module(
        0, 0.1, hidden_size=32, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=2, head_dim=128
    )
    module.set_dtype(mx.bfloat16)
    mx.eval(module.parameters())
    peaks, sizes = [], []
    for int8 in (False, True):
        context = PagedModel(module, int8=int8).new_context()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for start in range(0, 1024, 64):
            context.extend([(start + i) % 40 for i in range(64)], rows=0)
            context.evaluate()
        peaks.append(mx.get_peak_memory() - before)
        sizes.append(context.nbytes)
        assert mx.get_active_memory() - before <= sizes[-1] + 2**20  # nothing but the pool is left
        context.close()
        del context
    assert sizes[1] <= 0.51 * sizes[0]
    assert peaks[1] < peaks[0]
