"""Attend over pages. Rotates, writes and reads keys and values; knows nothing of layers' weights.

Two ways, chosen per pass: **dense**, when a sequence's pages are consecutive
(`mx.fast.scaled_dot_product_attention` on a slice of the pool), and **gather**, when they are not (the slots are
gathered first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_spec.kv import PagePool, PageTable

Rope = Callable[..., mx.array]
"""rope(x, offset=position of the first row), x and result (batch, heads, n, head_dim)."""


class AttentionPass:
    """One forward pass of `rows` new positions of each sequence: made once, used by every layer.

    The tables must have room for the rows already (`PageTable.append`). `rope` is the rotary embedding all layers
    share; `interleaved` says that it rotates neighbouring channels together.
    """

    def __init__(
        self, pool: PagePool, tables: Sequence[PageTable], rows: int, rope: Rope, interleaved: bool = False
    ) -> None:
        self._pool = pool
        starts = [table.length - rows for table in tables]
        offset = starts[0] if len(tables) == 1 else mx.array(starts)
        self._rotate = _rotation(rope, interleaved, len(tables), rows, pool.head_dim, offset)
        self._mask = "causal" if rows > 1 else None
        self._slots = [_slots(table, start) for table, start in zip(tables, starts, strict=True)]

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, scale: float
    ) -> mx.array:
        """Append the keys and values of the new rows and attend to all that each row may see.

        queries (batch, heads, n, head_dim) and keys, values (batch, kv_heads, n, head_dim), not yet rotated.
        Returns (batch, heads, n, head_dim).
        """
        queries, keys = self._rotate(queries), self._rotate(keys)
        if len(self._slots) == 1:
            return self._attend_one(layer, self._slots[0], queries, keys, values, scale)
        parts = [(queries[i : i + 1], keys[i : i + 1], values[i : i + 1]) for i in range(len(self._slots))]
        outputs = [
            self._attend_one(layer, slots, *part, scale) for slots, part in zip(self._slots, parts, strict=True)
        ]
        return mx.concatenate(outputs, axis=0)

    def _attend_one(
        self, layer: int, slots: _Slots, queries: mx.array, keys: mx.array, values: mx.array, scale: float
    ) -> mx.array:
        write, read = slots
        all_keys, all_values = self._pool.keys[layer], self._pool.values[layer]
        all_keys[:, :, write] = keys
        all_values[:, :, write] = values
        return mx.fast.scaled_dot_product_attention(
            queries, all_keys[:, :, read], all_values[:, :, read], scale=scale, mask=self._mask
        )


_Slots = tuple[slice | mx.array, slice | mx.array]


def _slots(table: PageTable, start: int) -> _Slots:
    """Where the positions from `start` on are written, and where all positions are read."""
    if table.consecutive:
        first = table.slot(0)
        return slice(first + start, first + table.length), slice(first, first + table.length)
    slots = mx.array([table.slot(position) for position in range(table.length)])  # (length,)
    return slots[start:], slots


def _rotation(
    rope: Rope, interleaved: bool, batch: int, rows: int, head_dim: int, offset: int | mx.array
) -> Callable[[mx.array], mx.array]:
    """How this pass rotates queries and keys.

    A GPU has one kernel for it. MLX's CPU backend computes the angles anew in a score of operations each time, so
    there the rows of cosines and sines are made once for all layers, by rotating a vector that shows them.
    """
    if interleaved or mx.default_device() != mx.cpu:
        return lambda x: rope(x, offset=offset)
    half = head_dim // 2
    probe = mx.broadcast_to((mx.arange(head_dim) < half).astype(mx.float32), (batch, 1, rows, head_dim))
    rotated = rope(probe, offset=offset)
    cosines, sines = rotated[..., :half], rotated[..., half:]
    by_cosine = mx.concatenate([cosines, cosines], axis=-1)  # (batch, 1, n, head_dim)
    by_sine = mx.concatenate([-sines, sines], axis=-1)

    def rotate(x: mx.array) -> mx.array:
        swapped = mx.concatenate([x[..., half:], x[..., :half]], axis=-1)
        return (x * by_cosine + swapped * by_sine).astype(x.dtype)

    return rotate
