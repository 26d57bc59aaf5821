"""Random arguments for kernels, small and awkward: partly filled pages, windows that have dropped pages, sinks, several
sequences. Knows the arguments of operations; nothing of how they are computed.

A problem comes twice: for the kernel, with NaN in every slot that no row sees, and clean for its twin. All of it is
made on the CPU, from numpy's generator, so that neither MLX's random state nor the GPU under test has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.kernels import reference
from mlx_spec.kernels.reference import EVERYTHING
from mlx_spec.kv import PAGE

KV_HEADS = 2


@dataclass(frozen=True)
class Scene:
    """What the rows look at."""

    name: str
    lengths: tuple[int, ...]  # of the sequences, with the new rows
    sinks: int = 0
    window: int = EVERYTHING
    drops: bool = False  # pages that no row sees are gone
    splits: int | None = None


SCENES = (
    Scene("a partly filled last page", (131, 64)),
    Scene("a window", (150, 203), sinks=4, window=70, splits=1),
    Scene("two pages of sinks and a wrapped window", (470, 333), sinks=70, window=97, drops=True, splits=3),
    Scene("a wrapped window, more splits than pages", (333,), sinks=4, window=70, drops=True, splits=40),
    Scene("nothing but the rows", (1, 90)),
)


@dataclass(frozen=True)
class Problem:
    """Arguments of `reference.paged_attention` but for the type of the result."""

    name: str
    given: dict[str, Any]
    clean: dict[str, Any]
    longest: int
    splits: int | None


def attention_problem(scene: Scene, head_dim: int, storage: mx.Dtype, group: int, rows: int) -> Problem:
    """`rows` new rows of each sequence, `group` query heads for each of two kv heads, pages in random order."""
    random = np.random.default_rng([head_dim, storage.size, group, rows, *scene.lengths])
    lengths = [max(length, rows) for length in scene.lengths]
    tables, states, seen = _tables(scene, lengths, rows, random)
    pool_pages = sum(map(len, tables)) + 1
    order = random.permutation(pool_pages)
    hidden = np.ones((pool_pages, PAGE), bool)
    for slot in seen:
        hidden[order[slot // PAGE], slot % PAGE] = False
    width = max(map(len, tables)) + 1
    # What a table is padded with must not be read: the last page is nobody's.
    pages = [[int(order[page]) for page in [*table, *[pool_pages - 1] * (width - len(table))]] for table in tables]
    shape = (1, KV_HEADS, pool_pages * PAGE, head_dim)
    with mx.stream(mx.cpu):
        queries = [
            normal(random, (len(lengths), KV_HEADS * group, rows, head_dim)) * (2 * head_dim**-0.5) for _ in range(2)
        ]
        stored = _stored(normal(random, shape), normal(random, shape), storage)
        unseen = mx.array(hidden.reshape(-1))
        spoilt = {
            name: array if array is None or array.dtype == mx.int8 else _without(array, unseen)
            for name, array in stored.items()
        }
        common = {
            "window_queries": queries[0],
            "sink_queries": queries[1],
            "pages": mx.array(pages, mx.int32),
            "state": mx.array(states, mx.int32),
        }
        mx.eval(common, stored, spoilt)
    return Problem(scene.name, {**common, **spoilt}, {**common, **stored}, max(lengths), scene.splits)


def _tables(
    scene: Scene, lengths: Sequence[int], rows: int, random: np.random.Generator
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Per sequence its pages, counted through, and its state; and all slots that a row sees."""
    tables: list[list[int]] = []
    states, seen, used = [], [], 0
    for length in lengths:
        first, head = length - rows, -(-scene.sinks // PAGE)
        dropped = max(0, (first - scene.window + 1) // PAGE - head) if scene.drops else 0
        table = list(range(used, used + -(-length // PAGE) - dropped))
        used += len(table)
        for position in range(length):
            if position < scene.sinks or position > first - scene.window:
                page = position // PAGE
                seen.append(table[page if page < head else page - dropped] * PAGE + position % PAGE)
        tables.append(table)
        state = [length, scene.sinks, scene.window, head, dropped]
        states.append(state + [0] * (reference.STATE_COLUMNS - len(state)))
    return tables, states, seen


def _stored(keys: mx.array, values: mx.array, storage: mx.Dtype) -> dict[str, mx.array | None]:
    if storage != mx.int8:
        keys, values, key_scales, value_scales = keys.astype(storage), values.astype(storage), None, None
    else:
        (keys, key_scales), (values, value_scales) = reference.quantize_rows(keys), reference.quantize_rows(values)
    return {"keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales}


def _without(array: mx.array, unseen: mx.array) -> mx.array:
    """array (1, kv_heads, slots, ...) with NaN in the slots that are not seen."""
    mask = unseen.reshape(1, 1, -1, *[1] * (array.ndim - 3))
    return mx.where(mask, mx.array(float("nan"), array.dtype), array)


def quantization_problems(head_dim: int, dtype: mx.Dtype, interleaved: bool) -> list[tuple[Any, ...]]:
    """Arguments of `reference.quantize_kv`: one row or several, few heads or many, a row of zeros."""
    problems = []
    for batch, kv_heads, rows in ((2, 3, 5), (1, 11, 1), (1, 8, 16)):
        random = np.random.default_rng([head_dim, kv_heads])
        with mx.stream(mx.cpu):
            shape = (batch, kv_heads, rows, head_dim)
            keys, values = (normal(random, shape).astype(dtype) for _ in range(2))
            keys[0, 1, 0], values[-1, -1, -1] = 0, 0
            angles = normal(random, (batch, rows, head_dim))
            divisors = mx.array(random.uniform(0.5, 2, (kv_heads, head_dim)), mx.float32)
            arguments = (keys, values, mx.cos(angles), mx.sin(angles), divisors, interleaved)
            mx.eval(arguments[:-1])
        problems.append(arguments)
    return problems


def parts(random: np.random.Generator, shape: tuple[int, ...]) -> list[mx.array]:
    """What splits found, (batch, heads, n, splits, head_dim), with maxima and sums: many saw nothing, and the first
    row saw nothing at all."""
    empty = random.random(shape[:-1]) < 0.3
    empty[0, 0, 0] = True
    sums = np.where(empty, 0, random.uniform(0.5, 9, shape[:-1]))
    maxima = np.where(empty, reference.HIDDEN, 5 * random.standard_normal(shape[:-1]))
    partials = sums[..., None] * random.standard_normal(shape)
    return [mx.array(part.astype(np.float32)) for part in (partials, maxima, sums)]


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> mx.array:
    return mx.array(random.standard_normal(shape, dtype=np.float32))
