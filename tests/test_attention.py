"""Attention over pages against plain attention in float64; rotation against MLX's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.attention import AttentionPass, Rope, _rotation
from mlx_spec.kv import PAGE, PagePool, PageTable

Array = np.ndarray
THETA = 10000.0


def unrotated(x: mx.array, offset: int | mx.array) -> mx.array:
    return x


def rope(head_dim: int, interleaved: bool = False, scaling: dict[str, Any] | None = None) -> Rope:
    return initialize_rope(head_dim, THETA, interleaved, scaling, 4096)


def rotated(x: Array, offset: int, interleaved: bool) -> Array:
    """Su et al. 2021 in float64. x and result (heads, n, head_dim)."""
    half = x.shape[-1] // 2
    angles = (offset + np.arange(x.shape[1]))[:, None] * THETA ** (-np.arange(half) / half)  # (n, half)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    one = first * np.cos(angles) - second * np.sin(angles)
    two = first * np.sin(angles) + second * np.cos(angles)
    return np.stack([one, two], -1).reshape(x.shape) if interleaved else np.concatenate([one, two], -1)


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

    def __init__(self, pool: PagePool, heads: int, rope: Any, interleaved: bool, seed: int) -> None:
        self.pool, self.heads, self.rope, self.interleaved = pool, heads, rope, interleaved
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
        if self.rope is not unrotated:
            queries = rotated(queries, offset, self.interleaved)
            all_keys = rotated(all_keys, 0, self.interleaved)
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
    attention = AttentionPass(pool, tables, rows, first.rope, first.interleaved)
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
    pool.release(table.pages[1::2])


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
    sequence = Sequence(pool, heads, rope(head_dim, interleaved), interleaved, seed=head_dim)
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
    sequence = Sequence(pool, 4, rope(32), False, seed=1)
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
        sequence = Sequence(pool, 4, rope(16), False, seed=3)
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
        [Sequence(pool, 4, rope(16, interleaved), interleaved, seed=seed) for seed in range(3)]
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
    parent = Sequence(pool, 2, rope(8), False, seed=0)
    step([parent], 70, tolerance=1e-5)
    child = Sequence(pool, 2, parent.rope, False, seed=1)
    child.table, child.keys, child.values = parent.table.fork(), list(parent.keys), list(parent.values)
    for _ in range(3):
        step([parent, child], 2, tolerance=1e-5)
    assert pool.references(parent.table.pages[0]) == 2
    assert parent.table.pages[1] != child.table.pages[1]


def test_nothing_is_rotated_where_the_rope_does_nothing() -> None:
    sequence = Sequence(pool_of(2, 16), 4, unrotated, False, seed=0)
    for rows in PLAN:
        step([sequence], rows, tolerance=1e-5)


# Rotation.

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [1.0 + i / 4 for i in range(8)],
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rotation_is_the_rope(kind: str, interleaved: bool, rows: int, dtype: mx.Dtype) -> None:
    interleaved = interleaved and kind != "longrope"  # mlx-lm's has no such form
    embedding = rope(16, interleaved, SCALINGS[kind])
    queries = mx.random.normal((1, 4, rows, 16), key=mx.random.key(0)).astype(dtype)
    tolerance = 2e-6 if dtype == mx.float32 else 0.03
    for offset in (0, 1, 63, 64, 1000):
        rotate = _rotation(embedding, interleaved, 1, rows, 16, offset)
        expected, actual = embedding(queries, offset=offset), rotate(queries)
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        difference = mx.abs(actual.astype(mx.float32) - expected.astype(mx.float32)).max()
        assert difference.item() <= tolerance * mx.abs(expected).max().item()


@pytest.mark.parametrize("kind", [kind for kind in SCALINGS if kind != "dynamic"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_a_batch_is_the_rope_at_each_offset(kind: str, interleaved: bool) -> None:
    interleaved = interleaved and kind != "longrope"
    embedding = rope(16, interleaved, SCALINGS[kind])
    keys = mx.random.normal((3, 2, 4, 16), key=mx.random.key(0))
    offsets = [0, 7, 300]
    actual = _rotation(embedding, interleaved, 3, 4, 16, mx.array(offsets))(keys)
    for index, offset in enumerate(offsets):
        expected = embedding(keys[index : index + 1], offset=offset)
        np.testing.assert_allclose(np.array(actual[index]), np.array(expected[0]), atol=1e-5, rtol=0)

