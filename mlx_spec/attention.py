"""Attend over pages. Rotates, writes and reads keys and values; knows nothing of layers' weights.

Three ways, chosen per pass. **Dense**: all positions are visible (`mx.fast.scaled_dot_product_attention` on a slice of
the pool, or on the gathered slots where pages are not consecutive; INT8 is dequantized, one layer at a time).
**Kernel**: Metal, a few rows over pages of any storage. **Gather**: the kernels' twin in plain MLX operations, for
what a window hides.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_spec import kernels
from mlx_spec.kernels.reference import STATE_COLUMNS
from mlx_spec.kv import PAGE, PagePool, PageTable
from mlx_spec.rotary import EXACT_FROM, Rotary, RotaryRows

_EVERYTHING = 2**30
"""As a window: no position is hidden."""
_SMALLEST_DIVISOR = 0.05
"""Of the mean over a head's channels. The first prompt may be short and leave a channel almost unused."""

_Slots = tuple[slice | mx.array, slice | mx.array]


class AttentionPass:
    """One forward pass of `rows` new positions of each sequence: made once, used by every layer.

    The tables must have room for the rows already (`PageTable.append`). `heads`, the number of query
    heads, is needed for a kernel to be chosen where the dense way would do.
    """

    def __init__(
        self, pool: PagePool, tables: Sequence[PageTable], rows: int, rotary: Rotary, heads: int | None = None
    ) -> None:
        self._pool, self._rotary = pool, rotary
        starts = [table.length - rows for table in tables]
        self._offset = starts[0] if len(tables) == 1 else mx.array(starts)
        self._mask = "causal" if rows > 1 else None
        hides = any(table.hides for table in tables)
        dense = not hides and not kernels.preferred(
            pool,
            rows,
            all(table.consecutive for table in tables),
            heads=heads,
            length=max(table.length for table in tables),
            batch=len(tables),
        )
        self._slots = [_slots(table, start, read_all=dense) for table, start in zip(tables, starts, strict=True)]
        self._rows: RotaryRows | None = None
        positions = np.array(starts)[:, None] + np.arange(rows)  # (batch, n)
        # MLX's CPU backend computes the angles anew in a score of operations per layer; a GPU has one kernel for it.
        on_cpu = mx.default_device() == mx.cpu
        if on_cpu or pool.int8 or not dense or positions.max() >= EXACT_FROM:
            self._rows = _batched(rotary.rows(positions))
        self._paged = None if dense else _Paged(tables, positions, rotary)

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
    ) -> mx.array:
        """Append the keys and values of the new rows and attend to all that each row may see.

        queries (batch, heads, n, head_dim) and keys, values (batch, kv_heads, n, head_dim), not yet rotated.
        Returns (batch, heads, n, head_dim).
        """
        self._write(layer, keys, values)
        if self._paged is None:
            # Dequantized keys and values are not rounded again where float32 costs nothing.
            wide = self._pool.int8 and mx.default_device() == mx.cpu
            rotated = self._rotate(queries.astype(mx.float32) if wide else queries)
            if self._pool.int8:
                rotated = self._multiplied(layer, rotated)
            return self._attend_densely(layer, rotated, scale).astype(queries.dtype)
        exact = queries.astype(mx.float32) * scale
        if self._pool.int8:
            exact = self._multiplied(layer, exact)
        paged = self._paged
        assert self._rows is not None
        key_scales, value_scales = self._pool.key_scales, self._pool.value_scales
        window_queries = self._rows.rotate(exact)
        return kernels.paged_attention(
            window_queries,
            window_queries if paged.sink_rows is None else paged.sink_rows.rotate(exact),
            self._pool.keys[layer],
            self._pool.values[layer],
            key_scales[layer] if key_scales else None,
            value_scales[layer] if value_scales else None,
            paged.pages,
            paged.state,
            queries.dtype,
        )

    def _write(self, layer: int, keys: mx.array, values: mx.array) -> None:
        if self._pool.int8:
            assert self._rows is not None
            rows, divisors = self._rows, self._divisors(layer, keys)
            parts = list(
                kernels.quantize_kv(keys, values, rows.cosines[:, 0], rows.sines[:, 0], divisors, rows.interleaved)
            )
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
        """What each key channel is divided by before it is rounded, (kv_heads, head_dim) float32.

        The largest length of each pair of channels that are rotated together, which rotation leaves alone, over the
        first keys the pool ever gets; fixed from then on. No later key is cut off, since each has a scale of its own,
        but divisors from a handful of tokens fit later keys badly, above all from the very first position, whose keys
        are unlike others. So the runtime reads a fixed text first (`PagedModel.calibrate`).
        """
        divisors = self._pool.divisors[layer]
        if divisors is None:
            divisors = _pair_lengths(keys, self._rotary.interleaved)
            self._pool.divisors[layer] = divisors
        return divisors

    def _multiplied(self, layer: int, queries: mx.array) -> mx.array:
        """Queries times the divisors of the keys they meet."""
        divisors = self._pool.divisors[layer]
        assert divisors is not None
        batch, heads, n, head_dim = queries.shape
        kv_heads = divisors.shape[0]
        grouped = queries.reshape(batch, kv_heads, heads // kv_heads, n, head_dim) * divisors[:, None, None]
        return grouped.reshape(queries.shape).astype(queries.dtype)


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


def _pair_lengths(keys: mx.array, interleaved: bool) -> mx.array:
    """keys (batch, kv_heads, n, head_dim) -> (kv_heads, head_dim) float32, both channels of a pair alike."""
    squares = mx.square(keys.astype(mx.float32))
    half = keys.shape[-1] // 2
    if interleaved:
        pairs = mx.unflatten(squares, -1, (half, 2)).sum(axis=-1)
    else:
        pairs = squares[..., :half] + squares[..., half:]
    lengths = mx.sqrt(pairs.max(axis=(0, 2)))  # (kv_heads, head_dim / 2)
    lengths = mx.maximum(lengths, _SMALLEST_DIVISOR * lengths.mean(axis=-1, keepdims=True) + 1e-6)
    return mx.repeat(lengths, 2, axis=-1) if interleaved else mx.concatenate([lengths, lengths], axis=-1)
