"""Attend over pages. Rotates, writes and reads keys and values; knows nothing of layers' weights, nor which way is the
fastest (`choosing` does).

**Dense**: all positions are visible (`mx.fast.scaled_dot_product_attention` on a slice of the pool). **Scattered**: the
same where pages are not consecutive, and are gathered first. **Vector** and **tile**: Metal kernels, a few rows over
pages of any storage, or any number where something is hidden. **Gather**: the kernels' twin in plain MLX operations,
for what a window hides.

MLX keeps the memory of results for others of the same size. So keys and values that are not a view are made in whole
pages, and cut to the length by a view: a new size every 64 tokens, not at every token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import mlx.core as mx
import numpy as np

from mlx_spec.attention.divisors import multiplied, pair_lengths
from mlx_spec.attention.rotary import EXACT_FROM, Rotary, RotaryRows
from mlx_spec.kernels import reference, registry
from mlx_spec.kernels.reference import EVERYTHING, STATE_COLUMNS
from mlx_spec.kv import PAGE, PagePool, PageTable

Way = Literal["dense", "scattered", "vector", "tile", "gather"]
WAYS: tuple[Way, ...] = get_args(Way)
Quantize = Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, bool], Sequence[mx.array]]
"""As `reference.quantize_kv`."""
_Slots = slice | mx.array


class AttentionPass:
    """One forward pass of `rows` new positions of each sequence: made once, used by every layer.

    The tables must have room for the rows already (`PageTable.append`). `quantize` is what an INT8 pool's new rows go
    through if they are of the type that the pool was made for; `execute` is what runs kernels.
    """

    def __init__(
        self,
        pool: PagePool,
        tables: Sequence[PageTable],
        rows: int,
        rotary: Rotary,
        way: Way,
        quantize: Quantize = reference.quantize_kv,
        execute: registry.Execute = registry.execute,
    ) -> None:
        self.batch = len(tables)
        self._pool, self._rotary, self._quantize = pool, rotary, quantize
        starts = [table.length - rows for table in tables]
        self._offset = starts[0] if len(tables) == 1 else mx.array(starts)
        self._mask = "causal" if rows > 1 else None
        self._writes = [_written(table, start) for table, start in zip(tables, starts, strict=True)]
        self._reads = None if way not in ("dense", "scattered") else [_Read(table) for table in tables]
        positions = np.array(starts)[:, None] + np.arange(rows)  # (batch, n)
        # MLX's CPU backend computes the angles anew in a score of operations per layer; a GPU has one kernel for it.
        on_cpu = mx.default_device() == mx.cpu
        self._rows: RotaryRows | None = None
        if on_cpu or pool.int8 or any(table.hides for table in tables) or positions.max() >= EXACT_FROM:
            self._rows = _batched(rotary.rows(positions))
        # Dequantized keys and values are not rounded again where float32 costs nothing.
        self._wide = pool.int8 and on_cpu
        self._paged = _Paged(tables, positions, rotary) if self._reads is None else None
        self._attend_to_pages: Callable[..., mx.array] = reference.paged_attention
        if way == "vector" or way == "tile":
            longest = max(len(table.pages) for table in tables) * PAGE
            self._attend_to_pages = functools.partial(
                registry.paged_attention, longest=longest, kernel=way, execute=execute
            )

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
    ) -> mx.array:
        """Append the keys and values of the new rows and attend to all that each row may see.

        queries (batch, heads, n, head_dim) and keys, values (batch, kv_heads, n, head_dim), not yet rotated.
        Returns (batch, heads, n, head_dim).
        """
        self._write(layer, keys, values)
        return self.attend_to_written(layer, queries, scale)

    def attend_to_written(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        """As `attend`, the keys and values of the new rows being in the pool already."""
        divisors = self._pool.divisors[layer]
        if self._paged is None:
            rotated = self.rotate(queries.astype(mx.float32) if self._wide else queries)
            if divisors is not None:
                rotated = multiplied(rotated, divisors)
            return self._attend_densely(layer, rotated, scale).astype(queries.dtype)
        exact = queries.astype(mx.float32) * scale
        if divisors is not None:
            exact = multiplied(exact, divisors)
        window_queries = self.rotate(exact)
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

    def rotate(self, x: mx.array) -> mx.array:
        """x (batch, any heads, n, head_dim), each row by its position."""
        return self._rotary.fused(x, self._offset) if self._rows is None else self._rows.rotate(x)

    def _write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        pool, rows = self._pool, self._rows
        parts: Sequence[mx.array]
        if pool.int8:
            assert rows is not None
            if (divisors := pool.divisors[layer]) is None:  # from the first keys the pool ever gets, and fixed then
                pool.divisors[layer] = divisors = pair_lengths(keys, self._rotary.interleaved)
            quantize = self._quantize if keys.dtype == pool.dtype else reference.quantize_kv
            parts = quantize(keys, values, rows.cosines[:, 0], rows.sines[:, 0], divisors, rows.interleaved)
        else:
            parts = self.rotate(keys), values
        if len(self._writes) == 1:
            pool.write(layer, self._writes[0], parts)
            return
        for index, slots in enumerate(self._writes):
            pool.write(layer, slots, [part[index : index + 1] for part in parts])

    def _attend_densely(self, layer: int, queries: mx.array, scale: float) -> mx.array:
        assert self._reads is not None
        outputs = [
            mx.fast.scaled_dot_product_attention(
                queries if len(self._reads) == 1 else queries[index : index + 1],
                *read(layer, queries.dtype),
                scale=scale,
                mask=self._mask,
            )
            for index, read in enumerate(self._reads)
        ]
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


class _Read:
    """Reads all positions of one sequence, none of which was dropped."""

    def __init__(self, table: PageTable) -> None:
        self._pool = table.pool
        self._end: int | None = None
        self._pages: mx.array | None = None
        self._slots = slice(0, 0)
        if table.consecutive:
            first = table.slot(0)
            self._slots = slice(first, first + table.length)
            if not self._pool.int8:
                return  # a view
        pages = -(-table.length // PAGE)
        self._end = table.length
        self._slots = slice(self._slots.start, self._slots.start + pages * PAGE)
        if not table.consecutive:
            self._pages = table.page_ids()[:pages]

    def __call__(self, layer: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Keys and values (1, kv_heads, length, head_dim)."""
        if self._pages is None:
            keys, values = self._pool.read(layer, self._slots, dtype)
        else:
            keys, values = self._pool.read_pages(layer, self._pages, dtype)
        if self._end is None:
            return keys, values
        return keys[:, :, : self._end], values[:, :, : self._end]


class _Paged:
    """What attention over pages is told of the sequences; see `mlx_spec.kernels.reference`."""

    def __init__(self, tables: Sequence[PageTable], positions: np.ndarray, rotary: Rotary) -> None:
        longest = max(8, *(len(table.pages) for table in tables))  # fewer would be padded for the kernel in every layer
        self.pages = mx.stack([mx.pad(t.page_ids(), (0, longest - len(t.pages))) for t in tables])
        rows = [[t.length, t.sinks, t.window or EVERYTHING, t.head_pages, t.dropped] for t in tables]
        self.state = mx.array([row + [0] * (STATE_COLUMNS - len(row)) for row in rows], mx.int32)
        self.sink_rows: RotaryRows | None = None
        if any(table.hides for table in tables):
            # The distance at which a full window would see the sinks, had nothing been dropped in between.
            furthest = np.array([[t.sinks + (t.window or EVERYTHING) - 1] for t in tables])
            self.sink_rows = _batched(rotary.rows(np.minimum(positions, furthest)))


def _batched(rows: RotaryRows) -> RotaryRows:
    """Rows (batch, n, head_dim) as (batch, 1, n, head_dim), to broadcast over heads."""
    return RotaryRows(rows.cosines[:, None], rows.sines[:, None], rows.interleaved)


def _written(table: PageTable, start: int) -> _Slots:
    """Where the positions from `start` on are. Looks at their pages alone: there may be thousands before."""
    first, end = start // PAGE, -(-table.length // PAGE)
    pages = table.pages[first - table.dropped : end - table.dropped]
    if all(page + 1 == following for page, following in pairwise(pages)):
        slot = table.slot(start)
        return slice(slot, slot + table.length - start)
    slots = (np.array(pages, np.int32)[:, None] * PAGE + np.arange(PAGE, dtype=np.int32)).reshape(-1)
    return mx.array(slots[start - first * PAGE : table.length - first * PAGE])
