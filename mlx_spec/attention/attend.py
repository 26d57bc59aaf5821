"""Attend over pages. Rotates, writes and reads keys and values; knows nothing of layers' weights.

Three ways, chosen per pass. **Dense**: all positions are visible (`mx.fast.scaled_dot_product_attention` on a slice of
the pool, or on the gathered slots where pages are not consecutive; INT8 is dequantized, one layer at a time).
**Kernel**: Metal, a few rows over pages of any storage, or any number where something is hidden. **Gather**: the
kernels' twin in plain MLX operations, for what a window hides.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_spec import kernels
from mlx_spec.attention.divisors import multiplied, pair_lengths
from mlx_spec.attention.rotary import EXACT_FROM, Rotary, RotaryRows
from mlx_spec.kernels import registry
from mlx_spec.kernels.choice import Trial
from mlx_spec.kernels.dispatch import Quantize
from mlx_spec.kernels.reference import STATE_COLUMNS
from mlx_spec.kernels.trials import DENSE, GATHER, SCATTERED, TILE, VECTOR, Shape, chained
from mlx_spec.kv import PAGE, PagePool, PageTable

_EVERYTHING = 2**30
"""As a window: no position is hidden."""

_Slots = tuple[slice | mx.array, slice | mx.array]


class AttentionPass:
    """One forward pass of `rows` new positions of each sequence: made once, used by every layer.

    The tables must have room for the rows already (`PageTable.append`). `heads`, the number of query heads, is needed
    for a kernel to be chosen. A `way` that is given is taken, with kernels run by `execute`.
    """

    def __init__(
        self,
        pool: PagePool,
        tables: Sequence[PageTable],
        rows: int,
        rotary: Rotary,
        heads: int | None = None,
        *,
        way: str | None = None,
        execute: registry.Execute = registry.execute,
    ) -> None:
        self._pool, self._rotary = pool, rotary
        starts = [table.length - rows for table in tables]
        self._offset = starts[0] if len(tables) == 1 else mx.array(starts)
        self._mask = "causal" if rows > 1 else None
        hides = any(table.hides for table in tables)
        held = max(len(table.pages) for table in tables) * PAGE
        if way is None:
            way = GATHER if hides else DENSE if all(table.consecutive for table in tables) else SCATTERED
            if heads is not None:
                way = kernels.way(kernels.pool_shape(pool, rows, heads, held, len(tables)), way, trials)
        dense = way in (DENSE, SCATTERED)
        self._slots = [_slots(table, start, read_all=dense) for table, start in zip(tables, starts, strict=True)]
        positions = np.array(starts)[:, None] + np.arange(rows)  # (batch, n)
        # MLX's CPU backend computes the angles anew in a score of operations per layer; a GPU has one kernel for it.
        on_cpu = mx.default_device() == mx.cpu
        self._rows: RotaryRows | None = None
        if on_cpu or pool.int8 or hides or positions.max() >= EXACT_FROM:
            self._rows = _batched(rotary.rows(positions))
        # Dequantized keys and values are not rounded again where float32 costs nothing.
        self._wide = pool.int8 and on_cpu
        self._paged = None if dense else _Paged(tables, positions, rotary)
        self._attend_to_pages = kernels.attending(way, held, execute)
        self._quantize: Quantize | None = None

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
    ) -> mx.array:
        """Append the keys and values of the new rows and attend to all that each row may see.

        queries (batch, heads, n, head_dim) and keys, values (batch, kv_heads, n, head_dim), not yet rotated.
        Returns (batch, heads, n, head_dim).
        """
        self._write(layer, keys, values)
        return self._attend(layer, queries, scale)

    def _attend(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        divisors = self._pool.divisors[layer]
        if self._paged is None:
            rotated = self._rotate(queries.astype(mx.float32) if self._wide else queries)
            if divisors is not None:
                rotated = multiplied(rotated, divisors)
            return self._attend_densely(layer, rotated, scale).astype(queries.dtype)
        exact = queries.astype(mx.float32) * scale
        if divisors is not None:
            exact = multiplied(exact, divisors)
        window_queries = self._rotate(exact)
        sink_rows = self._paged.sink_rows
        key_scales, value_scales = self._pool.key_scales, self._pool.value_scales
        return self._attend_to_pages(
            window_queries,
            window_queries if sink_rows is None else sink_rows.rotate(exact),
            self._pool.keys[layer],
            self._pool.values[layer],
            key_scales[layer] if key_scales else None,
            value_scales[layer] if value_scales else None,
            self._paged.pages,
            self._paged.state,
            queries.dtype,
        )

    def _write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        if self._pool.int8:
            rows = self._rows
            assert rows is not None
            if self._quantize is None:
                batch, kv_heads, n, head_dim = keys.shape
                self._quantize = kernels.quantizing(kv_heads, batch * n, head_dim, keys.dtype, rows.interleaved)
            divisors = self._divisors(layer, keys)
            parts = [
                *self._quantize(keys, values, rows.cosines[:, 0], rows.sines[:, 0], divisors, rows.interleaved)
            ]
        else:
            parts = [self._rotate(keys), values]
        if len(self._slots) == 1:
            self._pool.write(layer, self._slots[0][0], parts)
            return
        for index, (write, _) in enumerate(self._slots):
            self._pool.write(layer, write, [part[index : index + 1] for part in parts])

    def _attend_densely(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        outputs = []
        for index, (_, read) in enumerate(self._slots):
            keys, values = self._pool.read(layer, read, queries.dtype)
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    queries if len(self._slots) == 1 else queries[index : index + 1],
                    keys,
                    values,
                    scale=scale,
                    mask=self._mask,
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)

    def _rotate(self, x: mx.array) -> mx.array:
        return self._rotary.fused(x, self._offset) if self._rows is None else self._rows.rotate(x)

    def _divisors(self, layer: int, keys: mx.array) -> mx.array:
        """From the first keys the pool ever gets, and fixed from then on."""
        divisors = self._pool.divisors[layer]
        if divisors is None:
            self._pool.divisors[layer] = divisors = pair_lengths(keys, self._rotary.interleaved)
        return divisors


class _Paged:
    """What attention over pages is told of the sequences; see `mlx_spec.kernels.reference`."""

    def __init__(self, tables: Sequence[PageTable], positions: np.ndarray, rotary: Rotary) -> None:
        longest = max(8, *(len(table.pages) for table in tables))  # fewer would be padded for the kernel in every layer
        self.pages = mx.array([table.pages + [0] * (longest - len(table.pages)) for table in tables], mx.int32)
        rows = [[t.length, t.sinks, t.window or _EVERYTHING, t.head_pages, t.dropped] for t in tables]
        self.state = mx.array([row + [0] * (STATE_COLUMNS - len(row)) for row in rows], mx.int32)
        self.sink_rows: RotaryRows | None = None
        if any(table.hides for table in tables):
            # The distance at which a full window would see the sinks, had nothing been dropped in between.
            furthest = np.array([[t.sinks + (t.window or _EVERYTHING) - 1] for t in tables])
            self.sink_rows = _batched(rotary.rows(np.minimum(positions, furthest)))


def _batched(rows: RotaryRows) -> RotaryRows:
    """Rows (batch, n, head_dim) as (batch, 1, n, head_dim), to broadcast over heads."""
    return RotaryRows(rows.cosines[:, None], rows.sines[:, None], rows.interleaved)


def _slots(table: PageTable, start: int, *, read_all: bool) -> _Slots:
    """Where the positions from `start` on are written, and where all positions are read, if they are."""
    if table.consecutive:
        first = table.slot(0)
        return slice(first + start, first + table.length), slice(first, first + table.length)
    held = (np.array(table.pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)  # slots in the order of positions
    end = table.length - table.dropped * PAGE
    written = held[start - table.dropped * PAGE : end]
    write = slice(int(written[0]), int(written[0]) + 1) if len(written) == 1 else mx.array(written)
    return write, mx.array(held[:end]) if read_all else slice(0, 0)


class _Scattered(PageTable):
    """Taken for one whose pages do not follow one another."""

    @property
    def consecutive(self) -> bool:
        return False


def trials(shape: Shape, execute: registry.Execute = registry.execute) -> Mapping[str, Trial]:
    """Every way to attend in one layer, ready to be timed: from queries and keys that are not rotated to the result.

    Left out is what is the same for all ways: writing to the pool, and with it all that INT8 does to new keys.
    """
    int8 = shape.storage == mx.int8
    pool = PagePool(layers=1, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype, int8=int8)
    if int8:
        pool.divisors[0] = mx.ones((shape.kv_heads, shape.head_dim))
    runs, scattered = [PageTable(pool) for _ in range(shape.batch)], [_Scattered(pool) for _ in range(shape.batch)]
    for run, other in zip(runs, scattered, strict=True):
        run.append(max(shape.rows, shape.length))
        other.pages, other.length = run.pages, run.length
    pool.evaluate()
    rotary, scale = Rotary(nn.RoPE(shape.head_dim), shape.head_dim), shape.head_dim**-0.5

    def step(attention: AttentionPass, queries: mx.array) -> mx.array:
        if not int8:
            keys = attention._rotate(queries[:, : shape.kv_heads])
            [queries] = mx.depends([queries], [keys])
        return attention._attend(0, queries, scale)

    first = mx.zeros((shape.batch, shape.heads, shape.rows, shape.head_dim), shape.dtype)
    tables: dict[str, Sequence[PageTable]]
    tables = {DENSE: runs, SCATTERED: scattered, VECTOR: runs, TILE: runs, GATHER: runs}
    passes = {
        way: AttentionPass(pool, seen, shape.rows, rotary, way=way, execute=execute) for way, seen in tables.items()
    }
    return {way: functools.partial(chained, functools.partial(step, made), first) for way, made in passes.items()}


def prepare(pool: PagePool, heads: int, rotary: Rotary, *, window: bool, length: int | None = None) -> None:
    """Check and time, once per machine and kind of model, every kernel that passes of one sequence over this pool may
    take, so that no answer waits for it. Says so if there is anything to do; nothing without Metal.

    window: whether a window may hide positions. length: the most positions a sequence will hold, None if that is open.
    Takes seconds and some memory, which is not held on to. Kernels that fail are switched off with a warning.
    """
    plain = (DENSE, SCATTERED, GATHER) if window else (DENSE, SCATTERED)
    shape = kernels.pool_shape(pool, registry.MOST_ROWS, heads, _EVERYTHING if length is None else length)
    kernels.prepare(shape, plain, rotary.interleaved, trials)
