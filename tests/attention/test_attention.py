"""Attention over pages that hides nothing, against plain attention in float64."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from cache_positions import THETA, default_frequencies, rotated
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.attention.choosing import attention_pass
from mlx_spec.attention.rotary import Rotary
from mlx_spec.kv import PAGE, PagePool, PageTable

Array = np.ndarray


def rope(head_dim: int, interleaved: bool = False) -> Rotary:
    return Rotary(initialize_rope(head_dim, THETA, interleaved, None, 4096), head_dim)


def plain_attention(queries: Array, keys: Array, values: Array, scale: float) -> Array:
    """Causal; the queries are the last rows. queries (heads, n, head_dim), keys and values (kv_heads, length,
    head_dim); result (heads, n, head_dim) float64."""
    n, length, group = queries.shape[1], keys.shape[1], queries.shape[0] // keys.shape[0]
    keys, values = np.repeat(keys, group, axis=0), np.repeat(values, group, axis=0)
    scores = scale * queries @ keys.transpose(0, 2, 1)
    scores[:, np.arange(length) > length - n + np.arange(n)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


class Sequence:
    """A table, and all its un-rotated keys and values per layer."""

    def __init__(self, pool: PagePool, heads: int, rotary: Rotary, seed: int, rotates: bool = True) -> None:
        self.pool, self.heads, self.rotary, self.rotates = pool, heads, rotary, rotates
        self.table = PageTable(pool)
        self.random = np.random.default_rng(seed)
        empty = np.zeros((pool.kv_heads, 0, pool.head_dim))
        self.keys, self.values = [empty] * len(pool.keys), [empty] * len(pool.keys)

    def new_rows(self, rows: int) -> tuple[Array, Array, Array]:
        """Queries, keys and values of one layer, as the pool's type rounds them."""
        counts = (self.heads, self.pool.kv_heads, self.pool.kv_heads)
        shapes = [(count, rows, self.pool.head_dim) for count in counts]
        arrays = [mx.array(self.random.standard_normal(shape)).astype(self.pool.dtype) for shape in shapes]
        queries, keys, values = (np.array(array.astype(mx.float32)).astype(np.float64) for array in arrays)
        return queries, keys, values

    def expected(self, layer: int, queries: Array, keys: Array, values: Array, scale: float) -> Array:
        offset = self.keys[layer].shape[1]
        self.keys[layer] = np.concatenate([self.keys[layer], keys], axis=1)
        self.values[layer] = np.concatenate([self.values[layer], values], axis=1)
        all_keys = self.keys[layer]
        if self.rotates:
            frequencies, interleaved = default_frequencies(self.pool.head_dim), self.rotary.interleaved
            positions = np.arange(all_keys.shape[1])
            queries = rotated(queries, positions[offset:], frequencies, interleaved)
            all_keys = rotated(all_keys, positions, frequencies, interleaved)
        return plain_attention(queries, all_keys, self.values[layer], scale)

    def rewind(self, length: int) -> None:
        self.table.rewind(length)
        self.keys = [keys[:, :length] for keys in self.keys]
        self.values = [values[:, :length] for values in self.values]


def step(sequences: list[Sequence], rows: int, tolerance: float) -> list[mx.array]:
    """One pass over `rows` new positions of each sequence, in all layers; compared with the reference."""
    pool, first = sequences[0].pool, sequences[0]
    for sequence in sequences:
        sequence.table.append(rows)
    tables = [sequence.table for sequence in sequences]
    attention = attention_pass(pool, tables, rows, first.rotary, first.heads)
    scale, outputs = pool.head_dim**-0.5, []
    for layer in range(len(pool.keys)):
        new = [sequence.new_rows(rows) for sequence in sequences]
        stacked = [mx.array(np.stack(part)).astype(pool.dtype) for part in zip(*new, strict=True)]
        output = attention.attend(layer, *stacked, scale)
        assert output.shape == (len(sequences), first.heads, rows, pool.head_dim)
        assert output.dtype == pool.dtype
        for index, (sequence, part) in enumerate(zip(sequences, new, strict=True)):
            expected = sequence.expected(layer, *part, scale)
            actual = np.array(output[index].astype(mx.float32))
            np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=0)
        outputs.append(output)
    return outputs


def pool_of(kv_heads: int, head_dim: int, dtype: mx.Dtype = mx.float32) -> PagePool:
    return PagePool(layers=2, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


def scatter(pool: PagePool) -> None:
    """Take every second page of the pool for good, so that no table of two pages can be consecutive."""
    table = PageTable(pool)
    table.append(16 * PAGE)
    table.pages = table.pages[::2]
    pool.scattered = table  # type: ignore[attr-defined]  # for as long as the pool lives


PLAN = [1, 5, 57, 1, 1, 3, 60, 7, 2, 4, 6, 1]
"""Rows of successive passes; they meet, cross and just miss the borders at 64 and 128."""


@pytest.mark.parametrize("scattered", [False, True], ids=["dense", "gather"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "interleaved"), [
    (2, 2, 16, False), (4, 2, 16, False), (4, 1, 32, False), (4, 2, 80, False), (8, 2, 64, False),
    (4, 2, 16, True), (4, 1, 80, True), (3, 3, 2, False),
])
def test_attention_equals_plain_attention(
    scattered: bool, heads: int, kv_heads: int, head_dim: int, interleaved: bool
) -> None:
    pool = pool_of(kv_heads, head_dim)
    if scattered:
        scatter(pool)
    sequence = Sequence(pool, heads, rope(head_dim, interleaved), seed=head_dim)
    for rows in PLAN:
        step([sequence], rows, tolerance=1e-5)
    assert sequence.table.consecutive is not scattered
    for length, rows in ((140, 3), (128, 1), (127, 2), (64, 7), (3, 62), (0, 70)):
        sequence.rewind(length)
        step([sequence], rows, tolerance=1e-5)


@pytest.mark.parametrize("scattered", [False, True], ids=["dense", "gather"])
def test_attention_in_sixteen_bits(scattered: bool) -> None:
    pool = pool_of(2, 32, mx.bfloat16)
    if scattered:
        scatter(pool)
    sequence = Sequence(pool, 4, rope(32), seed=1)
    for rows in PLAN:
        step([sequence], rows, tolerance=0.03)
    assert sequence.table.consecutive is not scattered


@pytest.mark.parametrize("rows", range(1, 8))
def test_both_ways_agree(rows: int) -> None:
    results = []
    for scattered in (False, True):
        pool = pool_of(2, 16)
        if scattered:
            scatter(pool)
        sequence = Sequence(pool, 4, rope(16), seed=3)
        step([sequence], 126, tolerance=1e-5)
        results.append(step([sequence], rows, tolerance=1e-5))
    for dense, gathered in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(dense), np.array(gathered), atol=2e-6, rtol=0)


@pytest.mark.parametrize("scattered", [False, True], ids=["dense", "gather"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_batch_equals_single_passes(scattered: bool, interleaved: bool, rows: int) -> None:
    together, alone = pool_of(2, 16), pool_of(2, 16)
    if scattered:
        scatter(together)
    sequences = [
        [Sequence(pool, 4, rope(16, interleaved), seed=seed) for seed in range(3)]
        for pool in (together, alone)
    ]
    for batch, single, length in zip(*sequences, (3, 64, 131), strict=True):
        step([batch], length, tolerance=1e-5)
        step([single], length, tolerance=1e-5)
    for _ in range(3):
        outputs = step(sequences[0], rows, tolerance=1e-5)
        for index, single in enumerate(sequences[1]):
            for output, batched in zip(step([single], rows, tolerance=1e-5), outputs, strict=True):
                np.testing.assert_allclose(np.array(output[0]), np.array(batched[index]), atol=2e-6, rtol=0)


def test_a_batch_of_forks_writes_to_each_alone() -> None:
    pool = pool_of(1, 8)
    parent = Sequence(pool, 2, rope(8), seed=0)
    step([parent], 70, tolerance=1e-5)
    child = Sequence(pool, 2, parent.rotary, seed=1)
    child.table, child.keys, child.values = parent.table.fork(), list(parent.keys), list(parent.values)
    for _ in range(3):
        step([parent, child], 2, tolerance=1e-5)
    assert pool.references(parent.table.pages[0]) == 2
    assert parent.table.pages[1] != child.table.pages[1]


def test_nothing_is_rotated_where_no_channel_turns() -> None:
    still = Rotary(SimpleNamespace(_freqs=[np.inf] * 8), 16)
    sequence = Sequence(pool_of(2, 16), 4, still, seed=0, rotates=False)
    for rows in PLAN:
        step([sequence], rows, tolerance=1e-5)


def test_a_pass_on_a_gpu_uses_the_fused_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(Rotary, "rows", None)
    sequences = [Sequence(pool_of(2, 16), 4, rope(16), seed=0)]
    for rows in PLAN:
        step(sequences, rows, tolerance=1e-4)
    pool = pool_of(2, 16)
    sequences = [Sequence(pool, 4, rope(16), seed=seed) for seed in range(2)]
    step([sequences[0]], 70, tolerance=1e-4)
    for rows in (1, 3):
        step(sequences, rows, tolerance=1e-4)
