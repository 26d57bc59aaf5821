"""Attend over pages. Rotates, writes and reads keys and values; knows nothing of layers' weights.

Two ways, chosen per pass: **dense**, when a sequence's pages are consecutive
(`mx.fast.scaled_dot_product_attention` on a slice of the pool), and **gather**, when they are not (the slots are
gathered first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_spec.kv import PagePool, PageTable

Rotation = Callable[..., mx.array]
"""rotate(x, offset=position of the first row), x and result (batch, heads, n, head_dim)."""


class AttentionPass:
    """One forward pass of `rows` new positions of each sequence: made once, used by every layer.

    The tables must have room for the rows already (`PageTable.append`).
    """

    def __init__(self, pool: PagePool, tables: Sequence[PageTable], rows: int) -> None:
        self._pool = pool
        starts = [table.length - rows for table in tables]
        self._offset = starts[0] if len(tables) == 1 else mx.array(starts)
        self._mask = "causal" if rows > 1 else None
        self._sequences = [_slots(table, start) for table, start in zip(tables, starts, strict=True)]

    def attend(
        self, layer: int, queries: mx.array, keys: mx.array, values: mx.array, rotate: Rotation, scale: float
    ) -> mx.array:
        """Append the keys and values of the new rows and attend to all that each row may see.

        queries (batch, heads, n, head_dim) and keys, values (batch, kv_heads, n, head_dim), not yet rotated.
        Returns (batch, heads, n, head_dim).
        """
        queries = rotate(queries, offset=self._offset)
        keys = rotate(keys, offset=self._offset)
        all_keys, all_values = self._pool.keys[layer], self._pool.values[layer]
        outputs = []
        for index, (write, read) in enumerate(self._sequences):
            all_keys[:, write] = keys[index]
            all_values[:, write] = values[index]
            outputs.append(
                mx.fast.scaled_dot_product_attention(
                    queries if len(self._sequences) == 1 else queries[index : index + 1],
                    all_keys[None, :, read],
                    all_values[None, :, read],
                    scale=scale,
                    mask=self._mask,
                )
            )
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def _slots(table: PageTable, start: int) -> tuple[slice | mx.array, slice | mx.array]:
    """Where the positions from `start` on are written, and where all positions are read."""
    if table.consecutive:
        first = table.slot(0)
        return slice(first + start, first + table.length), slice(first, first + table.length)
    slots = mx.array([table.slot(position) for position in range(table.length)])  # (length,)
    return slots[start:], slots
